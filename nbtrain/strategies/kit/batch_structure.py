"""Where the tensors are in what a model is called with, or returns, and which of them are of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from nbtrain.compat import pytree

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""types of values that belong to the form"""


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of a value around its tensors."""

    key: Any
    """equal for two values of the same form, with the same plain values in it"""
    make: Callable[[Iterator[torch.Tensor]], Any]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.make(iter(tensors))


def flatten(value: Any, others: list[Any] | None = None) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of a value, and its form. `others` gets what is in it besides."""
    tensors: list[torch.Tensor] = []
    return tensors, _form(value, tensors, [] if others is None else others)


def _form(value: Any, tensors: list[torch.Tensor], others: list[Any]) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Structure("tensor", next)
    cls = type(value)
    if isinstance(value, PLAIN):
        return Structure((cls, value), lambda _: value)
    if cls in (list, tuple):
        parts = [_form(part, tensors, others) for part in value]
        return Structure((cls, *(part.key for part in parts)), lambda it: cls(part.make(it) for part in parts))
    if cls is dict:
        fields_there = {name: _form(part, tensors, others) for name, part in value.items()}
        key = (dict, *((repr(name), part.key) for name, part in fields_there.items()))
        return Structure(key, lambda it: {name: part.make(it) for name, part in fields_there.items()})
    if pytree.is_named_tuple(value):
        parts = [_form(part, tensors, others) for part in value]
        return Structure((cls, *(part.key for part in parts)), lambda it: cls(*(part.make(it) for part in parts)))
    if pytree.is_container(cls):
        leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)  # torch.Size is one, too
        parts = [_form(leaf, tensors, others) for leaf in leaves]
        return Structure(
            (cls, str(spec), *(part.key for part in parts)),
            lambda it: pytree.tree_unflatten([part.make(it) for part in parts], spec),
        )
    if is_dataclass(value):
        own = {field.name: _form(getattr(value, field.name, None), tensors, others) for field in fields(value)}
        return Structure((cls, *((n, part.key) for n, part in own.items())), lambda it: _with_fields(value, own, it))
    others.append(value)
    return Structure(cls, lambda _: value)


def _with_fields(value: Any, parts: dict[str, Structure], tensors: Iterator[torch.Tensor]) -> Any:
    made = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(made, name, part.make(tensors))  # it may be frozen
    return made


def sizes_of(batch: int, parts: int) -> list[int]:
    """How many samples each part has: as equal as can be, the first ones more."""
    parts = max(1, min(batch, parts))
    return [batch // parts + (i < batch % parts) for i in range(parts)]


def batch_of(tensors: Sequence[torch.Tensor]) -> int:
    """How many samples: the length of the first tensor that has one. 0: there is none."""
    return next((len(t) for t in tensors if t.dim()), 0)


def cut(tensors: Sequence[torch.Tensor], batch: int, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """For each part: its rows of the tensors that are as long as the batch, and the others as they are."""
    split = [t.split(list(sizes)) if t.dim() and len(t) == batch else (t,) * len(sizes) for t in tensors]
    return [[rows[i] for rows in split] for i in range(len(sizes))]
