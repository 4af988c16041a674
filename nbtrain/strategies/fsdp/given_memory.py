"""Notes ordinary tensors that a loop has given a parameter in pieces: `p.grad = tensor`, `p.data = tensor`.

In one process the parameter and the tensor then are one memory. In pieces each rank has copied its rows: what a loop
writes to the tensor afterwards, or reads there of what was written to the parameter, would be lost without a word. So
a tensor that was written to since is refused, and so is a part of a flat buffer that somebody still holds, once torch
writes to the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.compat.dtensor import local as local_part

APART = (
    "`p.{name} = tensor`: the tensor {reason}, and under fsdp each rank has copied its part of it, so that parameter "
    "and tensor are not one memory. Give it a copy, and work on p.{name} itself: p.{name} = tensor.clone()"
)


@dataclass(slots=True)
class _Given:
    parameter: DTensor
    base: ReferenceType[torch.Tensor]
    """the tensor, or what it is a part of"""
    version: int
    flat: bool
    memory: int
    """of the parameter's part, or of its gradient's"""


given: dict[tuple[int, str], _Given] = {}


def note(tensor: DTensor, name: str, value: torch.Tensor, now: torch.Tensor) -> None:
    """`value` was assigned to `p.grad` or `p.data`. `now`: this rank's part of it."""
    base = tensors.shown_by(value)
    if not base.is_inference():
        larger = base.numel() > value.numel()
        given[id(tensor), name] = _Given(tensor, ref(base), tensors.version(base), larger, now.data_ptr())


def forget() -> None:
    given.clear()


def check(written: str = "") -> None:
    """Before a forward, and before torch writes to `p.data` (a step) or `p.grad` (a backward): raise if the tensor was
    meant to be the same memory."""
    for key, memory in list(given.items()):
        name, base = key[1], memory.base()
        shown: Any = memory.parameter.grad if name == "grad" else memory.parameter
        if base is None or shown is None or local_part(shown).data_ptr() != memory.memory:
            del given[key]
        elif tensors.version(base) != memory.version:
            raise NotSupported(APART.format(name=name, reason="was written to afterwards"))
        elif memory.flat and name == written:
            raise NotSupported(APART.format(name=name, reason="is a part of a larger one that is still in use"))
