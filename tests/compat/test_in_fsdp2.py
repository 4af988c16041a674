"""What nbtrain/compat relies on in torch's `fully_shard`, on two ranks: units, weights, gradients that wait."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from nbtrain.compat import dtensor, fsdp2
from tests.support.ranks import on_ranks, run_on_ranks


def made() -> tuple[nn.Sequential, list[Any]]:
    """A model of two units and itself, and their states."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in (model, *model):
        fsdp2.average_rightly(unit)
    fsdp2.set_up(model)
    return model, [fsdp2.state(unit) for unit in (model, *model)]


def loss(model: nn.Module, rank: int = 0) -> torch.Tensor:
    found: torch.Tensor = model(torch.full((1, 2), float(rank + 1))).sum()
    return found


def alone() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


class Abstract(ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


@on_ranks
def test_units_of_an_abstract_class(rank: int) -> None:
    model = Abstract()
    fsdp2.make_class(Abstract)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert type(model).__mro__[1:3] == (FSDPModule, Abstract)
    loss(model).backward()


@on_ranks
def test_gradients_are_averaged(rank: int) -> None:
    model, _ = made()
    loss(model, rank).backward()
    one = alone()
    (sum(loss(one, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


@on_ranks
def test_a_unit_may_be_called_before_its_root_and_be_forgotten(rank: int) -> None:
    model, _ = made()
    model[0](torch.ones(1, 2))  # without a set-up it would be a root of its own from now on
    loss(model).backward()
    model[0].unshard()  # type: ignore[operator]
    fsdp2.forget(model[0])
    with pytest.raises(AssertionError, match="No FSDP state"):
        model[0].unshard()  # type: ignore[operator]


@on_ranks
def test_a_unit_has_groups_of_weights_in_pieces_and_whole(rank: int) -> None:
    model, (root, *units) = made()
    assert fsdp2.groups(root) == []
    for layer, state in zip(model, units, strict=True):
        (group,) = fsdp2.groups(state)
        assert [fsdp2.sharded(weight) for weight in fsdp2.all_weights(state)] == [layer.weight, layer.bias]
        assert dtensor.is_divided(layer.weight)
        assert fsdp2.unsharded(fsdp2.weights(group)[0]) is None
        assert fsdp2.reduces(group)
    loss(model)
    whole = fsdp2.unsharded(fsdp2.weights(fsdp2.groups(units[0])[0])[0])
    assert whole.shape == (4, 2)
    assert not dtensor.is_divided(whole)
    assert fsdp2.replaced(fsdp2.all_weights(units[0])) is None
    model[0].weight = nn.Parameter(torch.ones(4, 2))
    assert fsdp2.replaced(fsdp2.all_weights(units[0])) == (model[0], "weight", False)


@on_ranks
def test_what_is_gathered_need_not_be_shown(rank: int) -> None:
    model, (_, unit, _) = made()
    layer = model[0]
    assert not fsdp2.is_gathered(unit)
    layer.unshard()
    assert fsdp2.is_gathered(unit)
    whole = layer.weight
    fsdp2.show_pieces(unit)
    assert dtensor.is_divided(layer.weight)
    assert fsdp2.is_gathered(unit), "it is only not shown"
    fsdp2.show_gathered(unit)
    assert layer.weight is whole
    layer.weight.requires_grad_(False)
    fsdp2.show_pieces(unit)
    layer.weight.requires_grad_(True)
    fsdp2.show_gathered(unit)
    assert whole.requires_grad, "as its piece is"
    fsdp2.reshard(unit)
    assert dtensor.untouched(torch.equal, torch.ones(1), torch.ones(1))


@on_ranks
def test_other_memory_for_a_part_and_for_what_is_gathered(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 3, bias=False)  # of three rows the second rank has one, and sends two
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    fsdp2.average_rightly(model)
    fsdp2.set_up(model)
    state = fsdp2.state(model)
    (group,) = fsdp2.groups(state)
    (weight,) = fsdp2.weights(group)
    mine = dtensor.local(model.weight)
    for given in (torch.full_like(mine, 3.0), torch.zeros(9).as_strided(mine.shape, mine.stride(), 1)):
        before, stood = mine.detach(), mine.clone()
        fsdp2.give_memory(weight, given)
        assert mine.data_ptr() == given.data_ptr()
        assert torch.equal(before, stood)
        given.fill_(7.0)
        assert torch.equal(model(torch.eye(2)), torch.full((2, 3), 7.0))
        fsdp2.reshard(state)


@on_ranks
def test_where_a_forward_stands(rank: int) -> None:
    model, states = made()
    root, unit, _ = states
    seen: list[tuple[bool, bool]] = []
    model[0].register_forward_hook(lambda *args: seen.append((fsdp2.in_forward(root), fsdp2.at_rest(root))))
    loss(model)
    assert seen == [(True, False)]
    fsdp2.reset_tree(model, states)
    assert all(fsdp2.at_rest(one) for one in (*states, *fsdp2.groups(unit)))
    layer = model[0]
    layer.unshard()  # type: ignore[operator]
    assert not dtensor.is_divided(layer.weight)
    fsdp2.reshard(unit)
    assert dtensor.is_divided(layer.weight)


@on_ranks
def test_gradients_that_wait_are_found_and_forgotten(rank: int) -> None:
    model, states = made()
    weights = [weight for state in states for weight in fsdp2.all_weights(state)]
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    assert not any(fsdp2.reduces(group) for state in states for group in fsdp2.groups(state))
    loss(model, rank).backward()
    assert all(len(fsdp2.held_back(weight)) == 1 for weight in weights)
    assert all(fsdp2.sharded(weight).grad is None for weight in weights)
    fsdp2.drop_held_back(weights[0])
    assert fsdp2.held_back(weights[0]) == []
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    fsdp2.reset_tree(model, states)
    assert not any(fsdp2.held_back(weight) for weight in weights)
    loss(model, rank).backward()
    assert all(fsdp2.sharded(weight).grad is not None for weight in weights)
    kept = [fsdp2.sharded(weight).grad for weight in weights]
    fsdp2.reset_tree(model, states)
    assert all(fsdp2.sharded(weight).grad is one for weight, one in zip(weights, kept, strict=True))


@on_ranks
def test_after_an_error_a_model_trains_as_before(rank: int) -> None:
    """An error in the middle of a forward, and one in the middle of a backward."""
    model, states = made()

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    for place in ("forward", "backward"):
        hook = (
            model[1].register_forward_pre_hook(fail)
            if place == "forward"
            else model[0].register_full_backward_pre_hook(fail)
        )
        try:
            loss(model).backward()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError(place)
        hook.remove()
        for state in states:
            fsdp2.reset_unit(state)
        fsdp2.reset_tree(model, states)
        assert all(dtensor.is_divided(p) for p in model.parameters())
        model.zero_grad()
        loss(model).backward()
        one = alone()
        loss(one).backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


@on_ranks
def test_a_weight_that_was_not_used_gets_zeros(rank: int) -> None:
    model, (_, _, last) = made()
    (group,) = fsdp2.groups(last)
    weight, bias = fsdp2.weights(group)

    def fill(old: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            if not fsdp2.held_back(bias):
                fsdp2.give_zeros(bias)
            return old(*args)

        return send

    fsdp2.around_reduction(group, fill)
    layer = model[1]
    layer.forward = lambda x: x @ layer.weight.T  # type: ignore[method-assign]
    loss(model).backward()
    assert fsdp2.sharded(bias).grad.full_tensor().tolist() == [0.0, 0.0]
    assert fsdp2.sharded(weight).grad.full_tensor().abs().sum() > 0


def _around(rank: int) -> list[str]:
    model, states = made()
    first = states[1]
    calls: list[str] = []

    def seen(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(old: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return old(*args, **kwargs)

            return call

        return around

    (group,) = fsdp2.groups(first)
    fsdp2.around_gathering(group, seen("send for"), seen("wait"))
    fsdp2.around_outputs(first, seen("output"))
    fsdp2.around_reduction(group, seen("reduce"))
    for state in states:  # which of them ends it is the one whose output came first in the backward
        fsdp2.around_end(state, seen("end"))
    loss(model).backward()
    return calls


def test_what_is_put_around_is_called() -> None:
    for calls in run_on_ranks(_around):
        assert calls.index("send for") < calls.index("wait") < calls.index("output") < calls.index("reduce")
        assert calls.index("output") < calls.index("end")
        assert calls.count("end") == calls.count("output") == 1


class Plain(torch.autograd.Function):
    """Has no `jvp`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@on_ranks
def test_tensors_in_pieces_are_told_from_others(rank: int) -> None:
    model, _ = made()
    try:
        model[0].weight + torch.ones(4, 2)  # type: ignore[operator]
    except RuntimeError as error:
        said = error
    assert dtensor.met_undivided(said)
    assert not dtensor.met_undivided(RuntimeError("another"))
    for follow, x in ((torch.func.grad, torch.ones(())), (torch.func.vmap, torch.ones(3))):
        with pytest.raises(RuntimeError) as unfollowed:
            follow(lambda x: model[0].weight.to_local().sum() * x)(x)
        assert dtensor.was_not_followed(unfollowed.value)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError) as unfollowed:
        Plain.apply(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert dtensor.was_not_followed(unfollowed.value)
    assert not dtensor.was_not_followed(said)
    posing = torch.zeros(1)
    assert not dtensor.is_divided(posing)
    part = torch.ones(3)
    dtensor.pose_with_local(posing, part)
    assert dtensor.is_divided(posing)
    assert dtensor.local(posing) is part


@on_ranks
def test_torchs_own_number_of_a_weight_is_taken_off(rank: int) -> None:
    model = alone()
    weight = model[0].weight
    weight.noted = True  # type: ignore[assignment]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    fsdp2.take_number(weight)
    assert vars(weight) == {"noted": True}
    loss(model, rank).backward()
