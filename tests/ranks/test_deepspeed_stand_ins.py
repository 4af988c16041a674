"""Under DeepSpeed a cell's stand-ins for gradients and for the optimizer's state say what they are, torch's functions
are its own after every cell, and what DeepSpeed cannot follow is one sentence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed
from tests.support.deepspeed import SHARDED, batches, deepspeed_here, distance, make, mse, weights_of  # noqa: F401
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.thorough


def prepared_of(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    options = DeepSpeed.Options(stage=stage, config=SHARDED if stage == 3 else None)
    return DeepSpeed(options).set_up(Component({"model": model}, {"optimizer": optimizer}))


def one_step(prepared: Any, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x, y = batches(1)[0]
    with prepared.backward():
        mse(model(x[rank::2]), y[rank::2]).backward()
    optimizer.step()
    optimizer.zero_grad()


READS: dict[str, Callable[[Any], Any]] = {
    "exp_avg.norm()": lambda state: state["exp_avg"].norm(),
    "exp_avg.zero_()": lambda state: state["exp_avg"].zero_(),
    "float(step)": lambda state: float(state["step"]),
    "clone": lambda state: state["exp_avg_sq"].clone(),
    "deepcopy": copy.deepcopy,
    "print": str,
}


def state_of(rank: int, stage: int) -> None:
    model, optimizer, _ = make()
    prepared = prepared_of(stage, model, optimizer)
    for cell in range(2):  # in the first one the state comes to be
        prepared.enter()
        one_step(prepared, model, optimizer, rank)
        held = [p for p, entry in optimizer.state.items() if entry]
        assert len(held) > 3
        for p in held:
            for name, read in READS.items():
                with pytest.raises(NotSupported, match=r"optimizer\.state_dict\(\) gives the whole"):
                    read(optimizer.state[p])
                    pytest.fail(f"cell {cell}: {name}")
            assert optimizer.state[p]["exp_avg"].shape == p.shape
        whole = optimizer.state_dict()
        assert any(float(entry["exp_avg"].abs().sum()) > 0 for entry in whole["state"].values())
        optimizer.load_state_dict(copy.deepcopy(whole))
        with pytest.raises(NotSupported):
            optimizer.state[held[0]]["exp_avg"].sum()
        one_step(prepared, model, optimizer, rank)
        prepared.leave()
        values = [value for entry in optimizer.state.values() for value in entry.values()]
        assert {type(value) for value in values} == {torch.Tensor}
        assert all(float(entry["step"]) == 2 * (cell + 1) for entry in optimizer.state.values())
    prepared.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_read_or_edited_in_a_cell_is_one_sentence(stage: int) -> None:
    run_on_ranks(state_of, stage, timeout=100)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to a device": lambda model: model.to("cpu"),
    "to a dtype": lambda model: model.to(torch.float32),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
}


def moved(rank: int, stage: int) -> None:
    wanted, other, _ = make()
    model, optimizer, _ = make()
    prepared = prepared_of(stage, model, optimizer)
    prepared.enter()
    for (x, y), move in zip(batches(len(MOVES)), MOVES.values(), strict=True):
        mse(wanted(x), y).backward()
        other.step()
        other.zero_grad()
        with prepared.backward():
            mse(model(x[rank::2]), y[rank::2]).backward()
        move(model)
        optimizer.step()
        optimizer.zero_grad()
    one_step(prepared, model, optimizer, rank)
    x, y = batches(1)[0]
    mse(wanted(x), y).backward()
    other.step()
    with prepared.backward():
        mse(model(x[rank::2]), y[rank::2]).backward()
    with pytest.raises(NotSupported, match=r"device or dtype was changed in the cell"):
        model.blocks[0].weight.grad.double()  # type: ignore[index, union-attr, operator]
    optimizer.zero_grad()
    prepared.leave()
    prepared.close()
    assert distance(weights_of(model), weights_of(wanted)) < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_is_moved_to_where_it_is(stage: int) -> None:
    run_on_ranks(moved, stage, timeout=100)


def critic() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def another_layer(rank: int, stage: int) -> None:
    model, optimizer = critic()
    prepared = prepared_of(stage, model, optimizer)
    prepared.enter()
    old = model[2]
    model[2] = nn.Linear(8, 3)
    if stage == 3:
        with pytest.raises(NotSupported, match="make the layer and its optimizer in a cell before"):
            prepared.pause()
        prepared.leave()
        return
    prepared.pause()
    prepared.close()
    assert old.weight.shape == (1, 8)
    assert bool(old.weight.isfinite().all())
    other = torch.optim.AdamW(model.parameters(), 1e-2)
    component = Component({"model": model}, {"optimizer": optimizer, "other": other})
    with pytest.raises(NotSupported, match="make it and the layers that it is for in a cell before"):
        DeepSpeed(DeepSpeed.Options(stage=stage)).set_up(component)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_that_a_cell_puts_into_the_model_is_told(stage: int) -> None:
    run_on_ranks(another_layer, stage, timeout=100)


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
