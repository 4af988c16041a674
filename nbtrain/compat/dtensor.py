"""DTensor: a rank's part of it, and where torch moves rows between ranks. Torch is imported only when it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtrain.base.errors import text_of
from nbtrain.compat.internals import Internals, find

if TYPE_CHECKING:
    import torch

its = Internals("torch")

LOCAL = "_local_tensor"
"""The attribute that holds a rank's part."""
its.members("torch.distributed.tensor.DTensor", "_op_dispatcher")
its.fields("torch.distributed.tensor.DTensor", LOCAL)

FUNCTION = "torch.distributed.tensor.DTensor.__torch_function__"
"""Calls every function of torch that is given a DTensor. It is in C, is not bound, and calls the function plainly."""
its.members("torch.distributed.tensor.DTensor", "__torch_function__")

_PLAINLY = "torch._C._disabled_torch_function_impl"
its.members("torch._C", "_disabled_torch_function_impl")


def untouched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without `__torch_function__`, to which torch would pass the module's attribute of that name:
    perhaps a wrapper of nbtrain's."""
    return find(_PLAINLY)(function, (), args, kwargs)


def is_divided(tensor: Any) -> bool:
    """Whether a rank has a part of it: of a DTensor, told without importing it, or a stand-in for one's gradient."""
    return hasattr(tensor, LOCAL)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part itself; `to_local()` would add a node to the graph, or make a view."""
    part: torch.Tensor = tensor._local_tensor
    return part


def met_undivided(error: BaseException) -> bool:
    """Whether an operation was given a DTensor and an ordinary tensor; torch raises no class of its own for that."""
    return isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in text_of(error)


def was_not_followed(error: BaseException) -> bool:
    """Whether torch.func or forward mode met a function with a backward of its own, as DTensor's own are; torch raises
    no class for that, either."""
    said = "custom (autograd.)?Function|autograd.Function with functorch"
    return isinstance(error, RuntimeError) and bool(re.search(said, text_of(error)))


def pose_with_local(tensor: Any, part: torch.Tensor) -> None:
    """Make a whole tensor answer with this part where a rank's part is asked for."""
    tensor._local_tensor = part


# --- what is known of a function ---------------------------------------------------------------------


class Facts(NamedTuple):
    """What torch's schemas say of the operation of this name."""

    elementwise: bool = False
    """each number is made of those at the same place"""
    draws: bool = False
    """it draws random numbers"""
    shows: bool = False
    """its result may be a view of what it is given"""
    makes: bool = False
    """its result is new, and nothing that it is given is changed"""
    writes: bool = False
    """it writes to what it is given, and leaves its form as it is"""
    written: tuple[tuple[int, str], ...] = ()
    """(position, name) of what it writes to, but for `out`"""


def facts(name: str) -> Facts:
    import torch

    packet: Any = getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return Facts()
    ops = [getattr(packet, overload) for overload in packet.overloads()]
    own = [op for op in ops if not any(argument.is_out for argument in op._schema.arguments)]
    tags = {tag for op in own for tag in op.tags}
    changed = {
        (position, argument.name): str(argument.type)
        for op in own
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    changes = "Tensor" in changed.values()  # not a list
    shows = any(returned.alias_info for op in own if not op._schema.is_mutable for returned in op._schema.returns)
    return Facts(
        elementwise=torch.Tag.pointwise in tags,
        draws=torch.Tag.nondeterministic_seeded in tags,
        shows=shows,
        makes=not changes and not shows,
        writes=changes and torch.Tag.inplace_view not in tags,
        written=tuple(place for place, kind in changed.items() if kind == "Tensor" or name[0] == "_"),  # no list.sort
    )
