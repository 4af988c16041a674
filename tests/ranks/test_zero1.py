"""zero1 against one process, and what a rank keeps of an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nbtrain.specs import RankInfo
from nbtrain.strategies.zero1 import Zero1
from nbtrain.training.runtime import Runtime
from tests.ranks.test_ddp import CASES, Bench, Weights, net, train
from tests.support.ranks import run_on_ranks


class Divided(Bench):
    """A rank under zero1, or the one process that it is compared with."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        if world_size > 1:
            info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, device="cpu", threads=1)
            self.runtime = Runtime(info, Zero1(Zero1.Options(bucket_mb=0.0005)), lambda event: None)


def _run(rank: int, world_size: int) -> dict[str, Weights]:
    found = {}
    for case in CASES:
        bench = Divided(rank, world_size)
        bench.runtime.install()
        found[case.__name__] = {name: value.clone() for name, value in case(bench).items()}
        bench.runtime.uninstall()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Weights]]:
    return run_on_ranks(_run, 2, world_size=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_one_process(case: Callable[[Bench], Weights], ranks: list[dict[str, Weights]]) -> None:
    alone = Bench()
    alone.runtime.install()
    try:
        expected = case(alone)
    finally:
        alone.runtime.uninstall()
    for found in ranks:
        assert found[case.__name__].keys() == expected.keys()
        for name, value in expected.items():
            if name.startswith("state "):  # it is dealt out here
                continue
            torch.testing.assert_close(found[case.__name__][name], value, rtol=1e-5, atol=1e-5)
    for name in (name for name in expected if not name.startswith("state ")):
        assert torch.equal(ranks[0][case.__name__][name], ranks[1][case.__name__][name]), name


class Own(torch.optim.Optimizer):
    """A user's: its state comes with the first gradient, and now and then it raises."""

    raises = False

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Own.raises:
            raise ZeroDivisionError
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 / state["step"])
                p.sub_(state["mean"], alpha=group["lr"])


def _own(bench: Bench) -> Weights:
    """A step raises, and the loop goes on: every gradient is zeroed all the same."""
    model = net()
    first, *others = model.parameters()
    optimizer = Own([first])

    def loop() -> None:
        optimizer.add_param_group({"params": others, "lr": 0.02})
        for number, (x, y) in enumerate(bench.loader()):
            Own.raises = number == 1
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except ZeroDivisionError:
                optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert "zero_grad" not in vars(optimizer)
    return dict(model.named_parameters())


def _adafactor(bench: Bench) -> Weights:
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    bench.cell(lambda: train(model, optimizer, bench.loader()), model=model, optimizer=optimizer)
    return dict(model.named_parameters())


def _muon(bench: Bench) -> Weights:
    model = net()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 1e-2)
    bench.cell(lambda: train(model, optimizer, bench.loader()), model=model, optimizer=optimizer)
    return dict(model.named_parameters())


OTHERS = (_own, _adafactor, *([_muon] if hasattr(torch.optim, "Muon") else []))


def _run_others(rank: int, world_size: int) -> list[Weights]:
    found = []
    for case in OTHERS:
        bench = Divided(rank, world_size)
        bench.runtime.install()
        found.append({name: value.detach().clone() for name, value in case(bench).items()})
        bench.runtime.uninstall()
    return found


def test_other_optimizers_equal_one_process() -> None:
    expected = _run_others(0, 1)
    for found in run_on_ranks(_run_others, 2, world_size=2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
