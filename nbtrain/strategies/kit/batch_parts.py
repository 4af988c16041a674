"""What a call was given and what it returned, as tensors and the form around them: to be cut, and put together again.

Looked into are tuples, lists, dicts, named tuples, dataclasses and what torch's pytree knows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from nbtrain.compat import pytree

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""values by which two forms can be told apart"""


@dataclass(frozen=True, slots=True)
class Form:
    """Of a value without its tensors."""

    key: Any
    """equal for two values of the same form, with the same plain values in it"""
    make: Callable[[Iterator[torch.Tensor]], Any]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.make(iter(tensors))


def flatten(value: Any) -> tuple[list[torch.Tensor], Form]:
    found: list[torch.Tensor] = []
    return found, _form(value, found)


def _form(value: Any, found: list[torch.Tensor]) -> Form:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return Form("tensor", next)
    cls = type(value)
    if isinstance(value, PLAIN):
        return Form((cls, value), lambda _: value)
    if cls in (list, tuple):
        parts = [_form(part, found) for part in value]
        return Form((cls, *(part.key for part in parts)), lambda it: cls(part.make(it) for part in parts))
    if cls is dict:
        held = {name: _form(part, found) for name, part in value.items()}
        key = (dict, *((repr(name), part.key) for name, part in held.items()))
        return Form(key, lambda it: {name: part.make(it) for name, part in held.items()})
    if pytree.is_named_tuple(value):
        parts = [_form(part, found) for part in value]
        return Form((cls, *(part.key for part in parts)), lambda it: cls(*(part.make(it) for part in parts)))
    if pytree.is_container(cls):
        leaves, spec = pytree.tree_flatten(value)
        parts = [_form(leaf, found) for leaf in leaves]
        return Form(
            (cls, str(spec), *(part.key for part in parts)),
            lambda it: pytree.tree_unflatten([part.make(it) for part in parts], spec),
        )
    if is_dataclass(value):
        own = {one.name: _form(getattr(value, one.name, None), found) for one in fields(value)}
        return Form((cls, *((n, part.key) for n, part in own.items())), lambda it: _with_fields(value, own, it))
    return Form(cls, lambda _: value)


def _with_fields(value: Any, parts: dict[str, Form], tensors: Iterator[torch.Tensor]) -> Any:
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
