"""How weights are known in calls of `torch.autograd.grad`, and how often they are looked at."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.strategies.kit.call_arguments import WEIGHTS, by_name, called_with, with_weights
from nbtrain.training.gradients.by_autograd_grad import CALLS, LOOKS, AutogradGradients


class Prepared:
    """Of a model under ddp, as `AutogradGradients` sees it."""

    hooks_see_own_gradients = True

    def __init__(self) -> None:
        self.model, self.looked = nn.Linear(8, 8), 0

    @property
    def component(self) -> nn.Module:
        self.looked += 1
        return self.model


def looking(*prepared: Prepared) -> AutogradGradients:
    own: Any = AutogradGradients(SimpleNamespace(prepared=prepared))  # type: ignore[arg-type]
    own.begin(True)
    return own


def test_weights_are_gone_through_once_a_call_and_in_few_calls() -> None:
    prepared, other = Prepared(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    call = looking(prepared).called(torch.func.functional_call)
    for _ in range(2 * CALLS):
        call(other, dict(other.named_parameters()), torch.ones(2))
    assert 1 < prepared.looked <= CALLS
    with pytest.raises(TypeError):
        call(other)  # torch says what is missing


@pytest.mark.parametrize("kind", ["meta", "of a class of its own", "in a CUDA graph"])
def test_what_cannot_be_looked_at_is_given_all_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Blind(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("abs", "cpu", "double"):
                read.append(func)
                raise RuntimeError("no numbers")
            return super().__torch_function__(func, types, args, kwargs or {})

    prepared = Prepared()
    own = looking(prepared)
    weight = prepared.model.weight
    ones = torch.ones(8, 8)
    if kind == "in a CUDA graph":
        own.asked([weight], [ones], False)  # what warms it up
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
    own.asked([weight], [ones.to("meta") if kind == "meta" else ones.as_subclass(Blind)], False)
    assert own.looks == (LOOKS if kind == "meta" else 0)
    assert bool(read) is (kind == "of a class of its own")
    own.end()
    assert own.number() == {}


def test_no_gradient_is_held_after_a_cell() -> None:
    prepared = Prepared()
    own = looking(prepared)
    own.asked([prepared.model.weight], [torch.ones(8, 8)], False)
    held = [one.gradient for one in own.open]
    own.end()
    assert len(held) == 1
    assert own.number()
    assert not own.open


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gradient_was_made_of(dtype: torch.dtype) -> None:
    def number(seed: int, factor: Any) -> dict[str, int]:
        """Of a rank that has put a gradient there."""
        own = looking(prepared)
        given = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        own.asked([weight], [given], False)
        weight.grad = given * 0.1 + factor(given) * weight.detach()
        own.settle()
        weight.grad = None
        own.end()
        return own.number()

    prepared = Prepared()
    prepared.model.to(dtype)
    weight = prepared.model.weight
    assert number(0, lambda given: 0) == {}
    for decay in (0.5, 0.1, 0.01):
        assert number(0, lambda given: decay) == number(1, lambda given: decay)  # noqa: B023
    assert number(0, lambda given: given.norm()) != number(1, lambda given: given.norm())


@pytest.mark.parametrize("function", [torch.func.functional_call, torch.nn.utils.stateless.functional_call])
def test_weights_are_known_by_position_and_by_name(function: Any) -> None:
    name = list(inspect.signature(function).parameters)[1]
    assert name in WEIGHTS
    for args, kwargs in (((1, 2, 3), {}), ((1,), {name: 2}), ((), {"module": 1, name: 2})):
        assert called_with(args, kwargs) == (1, 2)
        assert called_with(*with_weights(args, kwargs, 4)) == (1, 4)
    assert called_with((), {}) == (None, None)
    assert by_name([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
