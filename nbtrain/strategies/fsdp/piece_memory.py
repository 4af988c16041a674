"""What a cell does with the memory of a tensor in pieces: gives it another (`p.data = tensor`), reads it, copies it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.fsdp import given_memory
from nbtrain.strategies.fsdp.refusals import refuse_differing
from nbtrain.strategies.fsdp.whole_values import full_tensor_in_graph
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.dtensor_operations import full_tensor, is_copy, replicated
from nbtrain.strategies.kit.row_shards import cut
from nbtrain.strategies.kit.written_numbers import wrote

OTHER = (
    "`p.data = tensor` of the form {} and {} in the place of {} and {}: under fsdp a weight in pieces keeps its "
    "shape and dtype. Make the tensor alike, or change the model in the notebook before the cell"
)
Function = Callable[..., Any]


def set_grad(func: Any, args: Any) -> Any:
    """`p.grad = tensor`: each rank takes its part of it."""
    tensor, value = args
    if (
        func == _SET_GRAD
        and isinstance(tensor, DTensor)
        and isinstance(value, torch.Tensor)
        and value.shape == tensor.shape
        and value.dtype == tensor.dtype
    ):
        if is_copy(value):
            return tensor, cut(tensor, full_tensor(value))  # type: ignore[arg-type]  # a copy is a DTensor
        if not isinstance(value, DTensor):
            refuse_differing("p.grad = tensor", tensor, (value,), {})
            piece = cut(tensor, value)
            given_memory.note(tensor, "grad", value, local_part(piece))
            return tensor, piece
    return args


_SET_GRAD = getattr(torch.Tensor, "grad").__set__  # noqa: B009 — mypy takes it for a tensor


def data(old: property) -> property:
    def show_it(tensor: DTensor) -> Any:
        return tensor.detach() if is_copy(tensor) else old.fget(tensor)  # type: ignore[misc]  # torch's can be read

    return property(show_it, lambda tensor, value: _put_there(old, tensor, value))


@torch.no_grad()
def _put_there(old: property, tensor: DTensor, value: Any) -> None:
    """`p.data = value`. Collective where the value is an ordinary tensor, or a copy. One in pieces is shared, as in one
    process; of an ordinary one each rank has a copy of its part."""
    if (
        local_part(tensor).is_meta
        or not isinstance(value, torch.Tensor)
        or (isinstance(value, DTensor) and value.dtype != tensor.dtype)
    ):
        old.fset(tensor, value)  # type: ignore[misc]  # a property of torch's that can be set
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise NotSupported(OTHER.format(tuple(value.shape), value.dtype, tuple(tensor.shape), tensor.dtype))
    full = value
    if isinstance(value, DTensor):
        wrote(value)
        if value.placements == tensor.placements:
            dtensor_operations.fresh(value)
            dtensor_operations.give(tensor, local_part(value))
            return
        value = full_tensor(value)
    else:
        refuse_differing("p.data = tensor", tensor, (value,), {})
    there = replicated(value.to(tensor.device_mesh.device_type), tensor)
    dtensor_operations.give(tensor, local_part(there.redistribute(placements=tensor.placements)).clone())
    if not isinstance(full, DTensor):
        given_memory.note(tensor, "data", full, local_part(tensor))


# --- functions of the tensor's memory ---------------------------------------------------------------


def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    """The memory of the whole tensor, read-only: what is written to it would be lost."""
    tensor = args[0]
    memory = func(full_tensor(tensor).detach().requires_grad_(tensor.requires_grad), *args[1:], **kwargs)
    if hasattr(memory, "flags"):
        memory.flags.writeable = False
    return memory


_wholes: Any = WeakTensorKeyDictionary()
"""this rank's part of a tensor → its whole, which lives as long, or until the cell ends"""


def _address(func: Any, args: Any, kwargs: Any) -> Any:
    """Libraries that read memory by its address (safetensors) read the whole, which stays where it is."""
    tensor, now = args[0], full_tensor(args[0])
    full = _wholes.setdefault(local_part(tensor), now)
    if full is not now:
        full.copy_(now)
    return func(full, *args[1:], **kwargs)


def _deepcopy(func: Any, args: Any, kwargs: Any) -> Any:
    """torch's own would read at an address. A copied parameter has no gradient."""
    tensor, memo = args
    if not tensor.is_leaf or id(tensor) in memo or isinstance(tensor, torch.nn.Parameter):
        with tensors.as_plain_tensors():
            gradient, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
            try:
                return func(*args, **kwargs)
            finally:
                if gradient is not None:
                    tensor.grad = gradient
    new = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    return new


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """An ordinary tensor. `zeros_like` and `clone`, whose shape is the weights' own, make one in pieces."""
    return func(local_part(args[0]), *args[1:], **kwargs)


FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys(("tolist", "numpy", "__array__"), _memory),
    **dict.fromkeys(("data_ptr", "untyped_storage", "storage"), _address),
    **dict.fromkeys(("new", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"), _new),
    "backward": lambda func, args, kwargs: func(full_tensor_in_graph(args[0]), *args[1:], **kwargs),
    "__deepcopy__": _deepcopy,
}


def forget() -> None:
    """Cells have ended: nobody reads any more at the addresses that they have asked for."""
    _wholes.clear()
    given_memory.forget()
