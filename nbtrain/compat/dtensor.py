"""DTensor: the part that a rank has of it, and where torch moves rows between ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbtrain.compat.fake import READS_A_NUMBER
from nbtrain.compat.internals import Internals

its = Internals("torch")
check = its.check

LOCAL = "_local_tensor"
"""The attribute that holds a rank's part."""
its.members("torch.distributed.tensor.DTensor", "_op_dispatcher")
its.fields("torch.distributed.tensor.DTensor", LOCAL)

_MOVE = "redistribute_local_tensor"
_MOVERS = tuple(f"torch.distributed.tensor.{name}" for name in ("_redistribute", "_dispatch", "_api"))


def local(tensor: Any) -> torch.Tensor:
    """This rank's part itself; `to_local()` would make a node of a graph of it, or a view."""
    part: torch.Tensor = tensor._local_tensor
    return part


def movers() -> list[str]:
    """The functions by which torch moves rows between ranks: one function, under the names of all modules that know
    it."""
    return [f"{name}.{_MOVE}" for name in _MOVERS if hasattr(sys.modules.get(name), _MOVE)]


def read_numbers_by(complete: Callable[[Any], torch.Tensor]) -> Callable[[], None] | None:
    """`tensor.item()`, `float(tensor)` and the like read what `complete` makes of the tensor; returns what takes that
    back. None where torch has no such table: then its methods have to be replaced."""
    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict) or READS_A_NUMBER in handlers:
        return None
    handlers[READS_A_NUMBER] = lambda op, args, kwargs: op(complete(args[0]))

    def undo() -> None:
        handlers.pop(READS_A_NUMBER, None)

    return undo


def pose_with_local(tensor: Any, part: torch.Tensor) -> None:
    """A tensor that is none in pieces: who asks for the part that a rank has of it is given this."""
    tensor._local_tensor = part
