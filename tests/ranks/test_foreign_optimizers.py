"""Optimizers that are not torch's where a rank has pieces: under `fsdp` and `deepspeed` each is right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.deepspeed import DeepSpeed
from nbtrain.strategies.fsdp import FSDP
from tests.support.bench import Bench
from tests.support.models import net
from tests.support.ranks import run_on_ranks


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.count = 0
        self.means = [torch.zeros_like(p) for p in self.held()]

    def held(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def momentum(self, p: torch.Tensor) -> Any:
        return self.state[p].setdefault("mean", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, group), alpha=group["lr"])

    def change(self, p: Any, group: Any) -> torch.Tensor:
        raise NotImplementedError


class Lion(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        return self.momentum(p).lerp_(p.grad, 0.5).sign()  # type: ignore[no-any-return]


class Counts(Own):
    """What it counts is in its groups, as in most that do not come with torch."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def change(self, p: Any, group: Any) -> torch.Tensor:
        if torch.isnan(p.grad).any():
            raise RuntimeError
        return self.momentum(p).lerp_(p.grad, 0.5) / (1 - 0.5 ** group["k"])  # type: ignore[no-any-return]


class CountsItself(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad / self.count  # type: ignore[no-any-return]


class Foreach(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for p in self.held() if p.grad is not None]
        new = torch._foreach_add(held, [p.grad for p in held], alpha=-0.05)
        torch._foreach_copy_(held, new)


class Clips(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.held(), 0.01)
        super().step()

    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad  # type: ignore[no-any-return]


class ClipsValues(Clips):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_value_(self.held(), 0.01)
        Own.step(self)


class Matrices(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad + 0.1 * p if p.dim() > 1 else p.grad  # type: ignore[no-any-return]


class Lamb(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad * (p.norm().clamp_(0.1, 10) / p.grad.norm())  # type: ignore[no-any-return]


class Rarely(Own):
    """The norm matters where it is large."""

    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad / (p.grad.norm() / 1000).clamp(min=1)  # type: ignore[no-any-return]


class Factored(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        if p.dim() < 2:
            return p.grad  # type: ignore[no-any-return]
        row = self.state[p].setdefault("row", torch.zeros_like(p[:, 0])).lerp_(p.grad.square().mean(1), 0.5)
        return p.grad / (row.sqrt()[:, None] + 0.1)  # type: ignore[no-any-return]


class Queue(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        last = self.state[p].setdefault("last", [])
        last.append(p.grad.clone())
        return torch.stack(last[-2:]).mean(0)


class Beside(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p, mean in zip(self.held(), self.means, strict=True):
                p.sub_(mean.lerp_(p.grad, 0.5), alpha=0.05)


class Around(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.AdamW(self.param_groups, 0.05)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for p in self.held() if p.grad is not None]).norm()
        for p in self.held():
            if p.grad is not None:
                p.grad /= norm
        self.inner.step()


class Noise(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        return p.grad + 0.1 * torch.randn_like(p)  # type: ignore[no-any-return]


class ById(Own):
    def change(self, p: Any, group: Any) -> torch.Tensor:
        kept = vars(self).setdefault("kept", {})
        return kept.setdefault(id(p), torch.zeros_like(p)).lerp_(p.grad, 0.5)  # type: ignore[no-any-return]


class Reads(torch.optim.AdamW):
    """Of torch's, and its step looks at the gradients first."""

    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = torch.stack([p.grad.norm() for p in held]).norm()
        for group in self.param_groups:
            group["lr"] = 0.01 if scale < 1 else 0.02
        return super().step(closure)


EVERY: tuple[type[Any], ...] = (
    Lion, Counts, Foreach, CountsItself, Matrices, Lamb, Clips, ClipsValues, Rarely, Factored, Queue, Beside, Around,
    Noise, Reads, ById, torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS,
)  # fmt: skip


def made(kind: type[Any], model: Any) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    if kind is torch.optim.LBFGS:
        return kind(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    return kind([{"params": matrices}, {"params": rest}])


def _trained(rank: int, world_size: int, make: Callable[[], Any] | None, kind: type[Any]) -> Any:
    """The weights, the numbers in its groups and what was said; or the sentence that refuses it."""
    bench = Bench(rank, world_size, make() if make else None)

    def program(bench: Bench) -> Any:
        model = net().double() if kind is torch.optim.LBFGS else net()  # it makes much of the last digits
        optimizer = made(kind, model)
        objects = {"model": model, "optimizer": optimizer}

        def train() -> None:
            for x, y in bench.loader():

                def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x.to(model.scale.dtype), spare=True), y)
                    loss.backward()
                    return loss

                if kind is torch.optim.LBFGS:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()

        try:
            notes = [note for _ in range(2) for note in bench.cell(train, **objects)]
        except NotSupported as error:
            return str(error)
        found: dict[str, Any] = {}
        bench.cell(lambda: found.update(model.state_dict()), **objects)
        counts = [{name: value for name, value in group.items() if name in "k lr"} for group in optimizer.param_groups]
        return {name: _whole(value) for name, value in found.items()}, counts, notes

    return bench.play(program)


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return found


def check(make: Callable[[], Any], kind: type[Any], right: bool, says: str) -> None:
    wanted, counts, _ = _trained(0, 1, None, kind)
    for answer in run_on_ranks(_trained, 2, make, kind):
        if not right:
            assert isinstance(answer, str)
            assert says in answer
            continue
        assert not isinstance(answer, str), answer
        weights, counted, notes = answer
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        assert counted == counts
        assert any(says in note for note in notes) if says else not any(kind.__name__ in note for note in notes), notes


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("kind", "stage", "says"),
    [
        (Counts, 1, ""),
        (Counts, 3, ""),
        (ClipsValues, 1, ""),
        pytest.param(Lion, 2, "", marks=pytest.mark.thorough),
        pytest.param(torch.optim.Rprop, 2, "", marks=pytest.mark.thorough),
        (Lamb, 2, "zero_allow_untested_optimizer"),
        (Reads, 2, "zero_allow_untested_optimizer"),
        pytest.param(torch.optim.Adafactor, 2, "zero1", marks=pytest.mark.thorough),
    ],
)
def test_deepspeed_steps_what_is_known_or_said_to_treat_each_element_by_itself(
    kind: type[Any], stage: int, says: str
) -> None:
    from nbtrain.strategies.deepspeed.library import imported

    imported(torch.device("cpu"))
    config = {} if says else {"zero_allow_untested_optimizer": True}
    check(lambda: DeepSpeed(stage=stage, config=config), kind, not says, says)


@pytest.mark.parametrize(
    "kind",
    [Factored, Queue, Around, *(pytest.param(one, marks=pytest.mark.thorough) for one in EVERY if one is not Queue)],
)
def test_fsdp_steps_any_optimizer_in_pieces(kind: type[Any]) -> None:
    check(FSDP, kind, True, "")
