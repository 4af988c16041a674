"""torch.func (grad, jvp, vmap, …) and dual numbers: inside, tensors in pieces are complete, on every rank.

What they wrap has no class of its own, by which functions of pieces are told apart from others: numbers of a stand-in
would be computed with, and nobody would know. Nor can they call a function with a backward of ours, by which pieces are
put together. So whatever comes to them in pieces is put together first, as for any function that reads it, outside of
all of them; and so is what the function that they call reads besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners, While
from nbtrain.compat.pytree import tree_map_only
from nbtrain.compat.replaced_functions import WRAP
from nbtrain.strategies.kit.known_functions import known, written
from nbtrain.strategies.kit.named_tensors import unknown

WHERE = "inside of torch.func"
COPY = (
    "where it is part of a loss, give it a copy, which every rank has: `with whole(model): twin = copy.deepcopy(model)`"
)
CALLED = (
    "{name} was called inside of torch.func (vmap, grad, jvp, …), or with dual numbers: {where} they cannot follow "
    "what the ranks do for each other in its layers: write `with whole(model): …` around it, or, {copy}"
)


def put(listeners: Listeners) -> None:
    for path in WRAP:
        listeners.listen(path, "pieces", _wrap)


listening: While[object] = While(put)
"""Components whose cells run, of strategies that keep states or gradients in pieces."""


def _wrap(old: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return old(followed(tensor), *args, **kwargs)

    return wrap


def refuse_traced(tensor: torch.Tensor) -> None:
    """Raise where the ranks' parts would be brought together while torch notes in a graph what is done: that would get
    what the ranks send each other, too."""
    if autograd_engine.is_traced():
        raise unknown("torch.func.linearize", tensor, "or another trace (make_fx, torch.export)")


def is_in_pieces(value: Any) -> bool:
    """Whether it has a class that stands for numbers of other ranks."""
    return type(value).__module__.startswith("nbtrain.") or is_divided(value)


def complete(value: Any) -> Any:
    """An ordinary tensor with all numbers, a part of the graph; any other value as it is. Collective."""
    if not isinstance(value, torch.Tensor) or not is_in_pieces(value):
        return value
    with autograd_engine.outside_transforms():
        return torch.stack([value])[0]


def followed(value: Any) -> Any:
    """The same where in a loss a gradient would have to come out again: it does for those that are divided by rows."""
    alone = isinstance(value, torch.Tensor) and is_in_pieces(value) and not is_divided(value)
    if alone and value.requires_grad and torch.is_grad_enabled():
        raise with_a_copy(unknown("torch.func", value, WHERE))
    return complete(value)


def with_a_copy(refusal: NotSupported) -> NotSupported:
    """In a loss a block is not enough: its backward comes after it."""
    return NotSupported(f"{refusal}; {COPY}")


def refuse_call(model: str, where: str) -> None:
    """Raise where a model is called inside."""
    if autograd_engine.is_followed():
        raise NotSupported(CALLED.format(name=model, where=where, copy=COPY))


def meets(name: str) -> bool:
    """Whether a function of this name, which is given a tensor in pieces, is called where that must be complete."""
    return autograd_engine.in_functional_transform() or name == autograd_engine.MAKE_DUAL


def call(func: Callable[..., Any], args: Any, kwargs: Any, whole: Callable[[Any], Any] | None = None) -> Any:
    """Call it with complete tensors. `whole`: gives one of them, outside of all."""
    if whole is None:
        whole = complete if func.__name__ == autograd_engine.MAKE_DUAL else followed
    targets = args if func.__name__ == "__set__" else written(known(func), args, kwargs, torch.Tensor)
    for target in filter(is_in_pieces, targets):
        raise unknown(func.__name__, target, WHERE)
    given, named = tree_map_only(torch.Tensor, whole, (args, kwargs))
    return func(*given, **named)
