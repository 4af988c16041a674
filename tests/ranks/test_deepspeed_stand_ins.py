"""Under DeepSpeed gradients that were zeroed are forgotten, however that was done and whatever came between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed
from tests.support.deepspeed import SHARDED, batches, deepspeed_here, distance, make, mse, weights_of  # noqa: F401
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.thorough


def prepared_of(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    options = DeepSpeed.Options(stage=stage, config=SHARDED if stage == 3 else None)
    return DeepSpeed(options).set_up(Component({"model": model}, {"optimizer": optimizer}))


def critic() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def each_grad(change: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], None]:
    def zero(model: nn.Module, optimizer: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                change(p)

    return zero


ZEROES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "the optimizer's": lambda _, optimizer: optimizer.zero_grad(),
    "the optimizer's, in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "the model's": lambda model, _: model.zero_grad(),
    "the model's, in place": lambda model, _: model.zero_grad(set_to_none=False),
    "None": each_grad(lambda p: setattr(p, "grad", None)),
    "zero_": each_grad(lambda p: p.grad.detach_().zero_()),  # type: ignore[union-attr]
}
LEAVES_NOTHING = (
    "",
    "autograd.grad",
    "through a frozen one",
    "of inputs alone",
    "of a frozen one's inputs",
    "of another model",
)


def zeroed(rank: int, stage: int, count: int) -> list[tuple[str, Any]]:
    """A loop of a critic that is zeroed in each way, with each thing before and after it that leaves no gradient."""
    (model, optimizer), (maker, its) = critic(), critic()
    maker.add_module("3", nn.Linear(1, 4))
    its.add_param_group({"params": maker[3].parameters()})
    engines = [prepared_of(stage, *one) for one in ((model, optimizer), (maker, its)) if count > 1]
    for one in engines:
        one.enter()
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))[rank::count]

    def backward(loss: torch.Tensor, **options: Any) -> None:
        with contextlib.ExitStack() as around:
            for one in engines:
                around.enter_context(one.backward())
            loss.backward(**options)

    def leaves_nothing(name: str) -> None:
        if not name:
            return
        x = batch.clone().requires_grad_()
        frozen = "frozen" in name
        model.requires_grad_(not frozen)
        if name == "autograd.grad":
            torch.autograd.grad(model(x).sum(), x)
        elif name == "of inputs alone":
            backward(model(x).mean(), inputs=[x])
        elif name == "of a frozen one's inputs":
            backward(model(x).mean())
        else:
            backward((model(maker(batch)) if frozen else maker(batch)).mean())
            its.step()
            its.zero_grad()
        model.requires_grad_(True)

    found: list[tuple[str, Any]] = []
    for (i, before), (j, after) in product(enumerate(LEAVES_NOTHING), repeat=2):
        way = [*ZEROES][(i + j) % len(ZEROES)]  # each with each
        case = f"{before} / {way} / {after}"
        try:
            leaves_nothing(before)
            ZEROES[way](model, optimizer)
            leaves_nothing(after)
            backward(model(batch).square().mean())
            optimizer.step()
        except NotSupported as error:
            return [*found, (case, str(error))]
        found.append((case, {n: w.clone() for n, w in model.state_dict().items()}))
    leaves_nothing("through a frozen one")
    backward(model(batch).square().mean())
    with contextlib.nullcontext() if count == 1 else pytest.raises(NotSupported, match="were not set to None or zero"):
        optimizer.step()
    for one in engines:
        one.leave()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zeroed_gradients_are_forgotten_whatever_came_between(stage: int) -> None:
    wanted = dict(zeroed(0, stage, 1))
    for found in run_on_ranks(zeroed, stage, 2, timeout=100):
        wrong = [
            (case, weights if isinstance(weights, str) else "other weights")
            for case, weights in found
            if isinstance(weights, str) or not distance(weights, wanted[case]) < 1e-5
        ]
        assert wrong == []
        assert len(found) == len(wanted)
