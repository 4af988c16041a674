"""Optimizers that people write, whose step looks at all parameters at once: under `zero1`, `sharded` and `fsdp`, too,
what one process makes of them, and a sentence that they are stepped whole."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nbtrain.strategies.kit.per_parameter_optimizers import known_by_name, steps_each_alone
from nbtrain.strategies.sharded import Sharded
from nbtrain.strategies.zero1 import Zero1
from tests.fuzz.player import Player
from tests.fuzz.verdicts import judge
from tests.support.bench import Bench
from tests.support.models import net, train
from tests.support.ranks import run_on_ranks

NOTEBOOK = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(11)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(3, (32,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
result = {}
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05): super().__init__(params, {"lr": lr})
    def held(self): return [p for group in self.param_groups for p in group["params"]]
class Clips(Own):
    @torch.no_grad()
    def step(self):
        norm = torch.stack([p.grad.norm() for p in self.held()]).norm()
        for p in self.held():
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad / (norm / 0.3).clamp(min=1), 0.5)
            p.sub_(state["mean"], alpha=0.5)
class Sharp(Own):
    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.inner.param_groups
    @torch.no_grad()
    def step(self, closure):
        norm = torch.stack([p.grad.norm() for p in self.held()]).norm()
        for p in self.held():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(0.2 / norm))
        self.zero_grad()
        with torch.enable_grad(): closure()
        for p in self.held(): p.copy_(self.state[p]["old"])
        self.inner.step()
class Lists(Own):
    def __init__(self, params):
        super().__init__(params)
        self.means = [torch.zeros_like(p) for p in self.held()]
    @torch.no_grad()
    def step(self):
        for p, mean in zip(self.held(), self.means):
            mean.mul_(0.9).add_(p.grad.sum())
            p.sub_(mean, alpha=0.05)
class Inherits(torch.optim.SGD): pass
class Noise(Own):
    @torch.no_grad()
    def step(self):
        for p in self.held(): p.sub_(0.05 * p.grad + 0.01 * torch.randn_like(p))
class Looks(Own):
    @torch.no_grad()
    def step(self):
        for p in self.held():
            state = self.state[p]
            if p.dim() > 1: state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            p.sub_(state.get("mean", p.grad), alpha=0.05)
class Behind(Own):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups)
        self.slow, self.count = [p.detach().clone() for p in self.held()], 0
    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.held(), self.slow):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
"""
LOOP = """
for epoch in range(2):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
result["weights"] = [p.detach().clone() for p in model.parameters()]
"""
CLOSURE = LOOP.replace("opt.step()", "opt.step(lambda: F.cross_entropy(model(x), y).backward())")
MADE = {
    "a norm over all": ("opt = Clips(model.parameters())", LOOP),
    "SAM with a closure": ("opt = Sharp(model.parameters())", CLOSURE),
    "buffers in a list": ("opt = Lists(model.parameters())", LOOP),
    "noise": ("opt = Noise(model.parameters())", LOOP),
    "state that stays empty": ("opt = Looks(model.parameters())", LOOP),
    "around another": ("opt = Behind(torch.optim.AdamW(model.parameters(), 0.05))", LOOP),
    "around one with a name": ("inner = torch.optim.AdamW(model.parameters(), 0.05); opt = Behind(inner)", LOOP),
    "one of each kind": (
        "opt = Clips(model[0].parameters()); other = torch.optim.AdamW(model[2].parameters(), 0.05)",
        LOOP.replace("opt.step()", "opt.step(); other.step(); other.zero_grad()"),
    ),
    "torch's own step": ("opt = Inherits(model.parameters(), 0.05, momentum=0.9)", LOOP),
}
KINDS = {"zero1": Zero1, "sharded": Sharded}
STRATEGIES = ["zero1", *(["sharded"] if find_spec("fairscale") else [])]


def cells(case: str) -> Iterator[list[tuple[bool, str]]]:
    """A notebook that makes it, one whose cell does, and one that has trained the model with another before."""
    make, loop = MADE[case]
    loop += "pass"
    yield [(False, NOTEBOOK + make), (True, loop), (True, loop)]
    yield [(False, NOTEBOOK), (True, f"{make}\n{loop}"), (True, loop)]
    adam = "opt = torch.optim.AdamW(model.parameters(), 0.01)"
    yield [(False, NOTEBOOK + adam), (True, LOOP + "pass"), (False, f"old = opt; {make}"), (True, f"old; {loop}")]


@pytest.mark.thorough
@pytest.mark.limit(240)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp"])
def test_an_optimizer_that_looks_at_all_parameters_is_right(one_process: Player, strategy: str) -> None:
    apart = []
    with Player(strategy) as ranks:
        for case in MADE:
            for number, program in enumerate(cells(case)):
                alone = one_process.play(program)
                assert alone[-1].error is None, alone[-1].error
                found = judge(alone, alone, ranks.play(program))
                if found.word != "right":
                    apart.append(f"{case}, {number}: {found.word} {found.why}")
    assert not apart, "\n".join(apart)


class Clips(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad / norm, 0.5)
            p.sub_(state["mean"], alpha=0.1)


def _clipped(rank: int, world_size: int, strategy: str) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    bench = Bench(rank, world_size, KINDS[strategy]() if strategy else None)

    def program(bench: Bench) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
        model = net()
        optimizer = Clips(model.parameters())
        objects = {"model": model, "optimizer": optimizer}
        notes = [bench.cell(lambda: train(model, optimizer, bench.loader()), **objects) for _ in range(2)]
        return notes, {name: value.clone() for name, value in model.state_dict().items()}

    return bench.play(program)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sentence_says_once_that_it_is_stepped_whole(strategy: str) -> None:
    _, wanted = _clipped(0, 1, "")
    for (first, second), weights in run_on_ranks(_clipped, 2, strategy):
        assert sum(note.startswith("Clips is not torch's own") for note in first) == 1, first
        assert not any("Clips" in note for note in second), second
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)


class Inherits(torch.optim.SGD):
    def __init__(self, params: object) -> None:
        super().__init__(params, 0.1)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class Overrides(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


class Arranges(torch.optim.AdamW):
    def _init_group(self, *args: object, **kwargs: object) -> object:
        return super()._init_group(*args, **kwargs)  # type: ignore[arg-type]


def test_of_which_it_is_known() -> None:
    held = [torch.nn.Parameter(torch.ones(2))]
    alone = [torch.optim.AdamW(held), torch.optim.Adafactor(held), Inherits(held)]
    assert all(map(steps_each_alone, [*alone, Inherits(held)])), "torch has put its wrapper around the step by now"
    others = [torch.optim.LBFGS(held), Overrides(held, 0.1), Arranges(held)]
    assert not any(map(steps_each_alone, others))
    assert known_by_name("AdamW")
    assert not any(map(known_by_name, ("LBFGS", "Lamb", "Optimizer", "lr_scheduler")))
