"""DTensor: the part that a rank has of it, and where torch moves rows between ranks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.compat.internals import Internals

if TYPE_CHECKING:
    import torch

its = Internals("torch")
check = its.check

LOCAL = "_local_tensor"
"""The attribute that holds a rank's part."""
its.members("torch.distributed.tensor.DTensor", "_op_dispatcher")
its.fields("torch.distributed.tensor.DTensor", LOCAL)

MOVERS = tuple(
    f"torch.distributed.tensor.{name}.redistribute_local_tensor" for name in ("_redistribute", "_dispatch", "_api")
)
"""One function, by which torch moves rows between ranks, under the names of all modules that know it."""


def is_divided(tensor: Any) -> bool:
    """A rank has a part of it: a DTensor, told without importing it, or what stands in for one's gradient."""
    return hasattr(tensor, LOCAL)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part itself; `to_local()` would make a node of a graph of it, or a view."""
    part: torch.Tensor = tensor._local_tensor
    return part


def met_undivided(error: BaseException) -> bool:
    """An operation was given a tensor in pieces and an ordinary one. torch raises no class of its own for it."""
    return isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in str(error)


class _Handle:
    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def read_numbers_by(complete: Callable[[Any], torch.Tensor]) -> Any:
    """`tensor.item()`, `float(tensor)` and the like read what `complete` makes of the tensor; returns a handle, as of a
    hook. None where torch has no such table: then its methods have to be replaced."""
    from torch.distributed.tensor import DTensor

    from nbtrain.compat.fake import READS_A_NUMBER

    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict) or READS_A_NUMBER in handlers:
        return None
    handlers[READS_A_NUMBER] = lambda op, args, kwargs: op(complete(args[0]))

    return _Handle(lambda: handlers.pop(READS_A_NUMBER, None))


def pose_with_local(tensor: Any, part: torch.Tensor) -> None:
    """A tensor that is none in pieces: who asks for the part that a rank has of it is given this."""
    tensor._local_tensor = part
