"""Computes with tensors in pieces as with ordinary ones, where torch does not.

That is: mixed with ordinary ones (`w * mask`), differentiated outside of a forward (a penalty in the loss), or read as
a whole (`w.tolist()`).

torch refuses to mix its DTensors with others, and knows no rule for some operations. While a cell runs, each function
of torch that is given one comes here first. As long as torch computes by pieces, it does. Else:

- what is read is put together, and the result is an ordinary tensor. Autograd goes through that: each rank has the
  gradient of the whole, their mean is taken, and each rank keeps its part of it;
- what is written is written to the whole, or where that is enough to this rank's rows, from the same on all ranks.

All of it needs every rank, as an operation on tensors in pieces may.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat import dtensor, tensors
from nbtrain.compat.dtensor import local as local_part
from nbtrain.errors import NbtrainError, NotSupported
from nbtrain.intercept import Listeners
from nbtrain.strategies.fsdp import given_memory
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.dtensor_operations import (
    MADE_BY,
    WRITE_TOO,
    counts,
    numbers_in,
    put_together,
    replicated,
    tensors_in,
    written_by,
    wrote,
)
from nbtrain.strategies.kit.row_shards import by_rows, cut, evenly
from nbtrain.strategies.kit.same_on_ranks import differing

OTHER = (
    "`p.data = tensor` of the form {} and {} in the place of {} and {}: under fsdp a weight in pieces keeps its "
    "shape and dtype. Make the tensor alike, or change the model in the notebook before the cell"
)
DIFFERS = (
    "`{}` writes to a weight, gradient or state in pieces with a tensor that differs between ranks, and under fsdp "
    "each rank keeps its part of one tensor. Give all ranks the same: reduce(tensor), or for random numbers "
    "torch.randn_like(weight)"
)

Function = Callable[..., Any]

NO_RULE = (
    "`{}` cannot be computed in place by pieces under fsdp: compute a new tensor, and write it: "
    "w.copy_(w.cumsum(0)), and not w.cumsum_(0)"
)
COMPUTED = (
    "`{}` writes with an ordinary tensor to what was computed from weights in pieces, which autograd cannot follow "
    "under fsdp. Compute a new tensor: a = a * b, and not a *= b or a.mul_(b)"
)

BY_PIECES = frozenset({
    "square", "pow", "__pow__", "abs", "__abs__", "neg", "__neg__", "sum", "mul", "__mul__", "__rmul__", "add",
    "__add__", "__radd__", "sub", "__sub__", "__rsub__", "div", "__truediv__",
})  # fmt: skip
"""Functions that autograd follows by pieces; through all others it goes by the whole."""
ROW_BY_ROW = frozenset({
    "mul_", "add_", "sub_", "div_", "copy_", "lerp_", "masked_fill_", "addcmul_", "addcdiv_", "multiply_", "divide_",
    "subtract_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "__imul__", "__iadd__", "__isub__", "__itruediv__",
})  # fmt: skip
"""Functions that write each number from those at the same place."""
WHOLE_AT_ONCE = frozenset({"quantile", "nanquantile", "equal"})
"""Functions that torch computes by pieces with a warning, or by each rank's own piece."""
EXTREME = math.inf, -math.inf
"""Norms that are the largest or smallest number: no rows have none."""
PLAINLY = frozenset({"__get__", "__delete__", "grad"})
"""An attribute that is read; torch.autograd.grad, whose inputs are these very tensors."""
ASKS = frozenset({"type_as", "to"})
"""Functions that ask another tensor for its dtype and device."""
OF_MEMORY = frozenset({"tolist", "numpy", "__array__"})
ADDRESSES = frozenset({"data_ptr", "untyped_storage", "storage"})


def put(listeners: Listeners) -> None:
    """Put these in place while a cell runs."""
    listeners.listen(dtensor.FUNCTION, "values", _listener)
    listeners.listen("torch.distributed.tensor.DTensor.data", "values", _data)


def _computing(plainly: Function) -> Function:
    """`plainly`: the function as torch's own class has it called."""

    def compute(func: Any, name: str, types: Any, args: Any, kwargs: Any) -> Any:
        special = _SPECIAL.get(name)
        if special is not None and isinstance(args[0], DTensor):
            return special(func, args, kwargs)
        pieces, others = _told_apart(args, kwargs)
        if not pieces or local_part(pieces[0]).is_meta:
            return plainly(func, types, args, kwargs)
        together = dtensor.brings_rows_together(func) or name in dtensor.NORMS
        if name in WHOLE_AT_ONCE or (together and _by_the_whole(func, name, pieces, args, kwargs)):
            return _on_the_whole(func, name, args, kwargs)
        if others and _mixed(others):
            return _computed(func, name, types, args, kwargs, plainly)
        recorded = torch.is_grad_enabled() and any(one.requires_grad for one in pieces)
        if recorded and name in BY_PIECES:
            args, kwargs = _mapped(_aligned, args, kwargs)
            return plainly(func, types, args, kwargs)
        try:
            found = plainly(func, types, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NbtrainError | torch.OutOfMemoryError | dist.DistError):
                raise
            if written_by(name, args, kwargs):
                if isinstance(error, NotImplementedError):
                    raise NotSupported(NO_RULE.format(name)) from error
                raise
            return _on_the_whole(func, name, args, kwargs)
        if recorded and any(isinstance(one, DTensor) and one.grad_fn is not None for one in tensors_in((found,), {})):
            return found if written_by(name, args, kwargs) else _on_the_whole(func, name, args, kwargs)
        return found

    return compute


def _listener(plainly: Function) -> Function:
    """Around that: what is written is counted, and the numbers that it is made of are noted."""
    compute = _computing(plainly)

    def function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in PLAINLY:
            return plainly(func, types, args, kwargs)
        if name == "__set__":
            counts[0] += 1
            given = args[1]  # most often a gradient, or none
            if given is None or (type(given) is DTensor and MADE_BY not in vars(given)):
                return plainly(func, types, args, kwargs)
            wrote(given)
            return plainly(func, types, _set(func, args), kwargs)
        if (name[-1:] == "_" and (name[-2:] != "__" or name in WRITE_TOO)) or "out" in kwargs:
            counts[0] += 1
            wrote(*args[1:], *kwargs.values())
            return compute(func, name, types, args, kwargs)
        found = compute(func, name, types, args, kwargs)
        if isinstance(found, torch.Tensor | list | tuple) and (made := numbers_in((*args, *kwargs.values()))):
            for one in (found,) if isinstance(found, torch.Tensor) else tensors_in((found,), {}):
                if type(one) is DTensor:
                    vars(one).setdefault(MADE_BY, made)  # it may be what was given
        return found

    return function


# --- what is there --------------------------------------------------------------------------------


def _mapped(change: Callable[[torch.Tensor], Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    def of(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return change(one)
        if type(one) in (list, tuple):
            return type(one)(change(inner) if isinstance(inner, torch.Tensor) else inner for inner in one)
        return one

    return tuple(map(of, args)), {key: of(value) for key, value in kwargs.items()}


def _told_apart(args: Any, kwargs: Any) -> tuple[list[DTensor], list[torch.Tensor]]:
    """(tensors in pieces, ordinary ones). Fast, as an optimizer's step comes here many times."""
    pieces: list[DTensor] = []
    others: list[torch.Tensor] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if type(one) is DTensor:
            pieces.append(one)
        elif isinstance(one, torch.Tensor | list | tuple):
            for inner in one if isinstance(one, list | tuple) else (one,):
                if isinstance(inner, DTensor):
                    pieces.append(inner)
                elif isinstance(inner, torch.Tensor):
                    others.append(inner)
    return pieces, others


def _mixed(others: list[torch.Tensor]) -> bool:
    """Whether torch refuses one of these ordinary tensors. It takes numbers, where autograd is not to follow."""
    for one in others:  # noqa: SIM110  # a generator is one call more, for each function of a step
        if one.ndim > 0 or (one.requires_grad and torch.is_grad_enabled()):
            return True
    return False


def _by_the_whole(func: Any, name: str, pieces: list[DTensor], args: Any, kwargs: Any) -> bool:
    """Whether it is computed on the whole because ranks have different numbers of rows, perhaps none."""
    if not dtensor.brings_rows_together(func):
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, float))
        if name not in dtensor.NORMS or not any(one in EXTREME for one in given):
            return False
    return not written_by(name, args, kwargs) and not all(map(evenly, pieces))


# --- reading --------------------------------------------------------------------------------------


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """As an ordinary tensor, which autograd follows where the one in pieces may be differentiated."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: torch.Tensor = _Whole.apply(tensor)
        return found
    return put_together(tensor)


def _on_the_whole(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    asks = name in ASKS and not isinstance(args[0], DTensor)
    args, kwargs = _mapped(_local_part if asks else whole_of, args, kwargs)
    return func(*args, **kwargs)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


class _Whole(torch.autograd.Function):
    """The whole of a tensor in pieces. Each rank's loss counts as it does for the model's own gradients: their mean."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.at = local_part(tensor).device
        return put_together(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        there = mean_of_ranks(gradient.to(ctx.mesh.device_type))
        return _gradient(there, ctx.mesh, ctx.placements, ctx.at)


class _Aligned(torch.autograd.Function):
    """The tensor itself. Its gradient is divided as the tensor is, however the gradient was computed."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Any:
        ctx.placements = tensor.placements
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return gradient.redistribute(placements=ctx.placements)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor.requires_grad and tensor.is_leaf:
        found: torch.Tensor = _Aligned.apply(tensor)
        return found
    return tensor


def mean_of_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """The mean of tensors that each rank has whole. Collective."""
    mean = gradient.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


def part_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that is the same on all ranks, in pieces as `like` is."""
    return _gradient(whole.to(like.device_mesh.device_type), like.device_mesh, like.placements, local_part(like).device)


def _gradient(whole: torch.Tensor, mesh: Any, placements: Any, device: torch.device) -> DTensor:
    """The gradient of the part that each rank has. The gradient of a summand is that of the sum."""
    there = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    there = there.redistribute(placements=[Replicate() if isinstance(one, Partial) else one for one in placements])
    moved: Any = there if local_part(there).device == device else there.to(device)
    return moved  # type: ignore[no-any-return]  # a DTensor, which `to` does not say


# --- writing --------------------------------------------------------------------------------------


def _computed(func: Any, name: str, types: Any, args: Any, kwargs: Any, plainly: Function) -> Any:
    """Call a function that is given tensors in pieces and ordinary ones."""
    written = written_by(name, args, kwargs)
    if not written:
        return _on_the_whole(func, name, args, kwargs)
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(args, kwargs)):
        if any(not one.is_leaf for one in written):
            raise NotSupported(COMPUTED.format(name))
        return plainly(func, types, args, kwargs)  # torch says that a leaf cannot be written to so
    _refuse_differing(name, args, kwargs)
    first = written[0]
    alike = all(one.shape == first.shape or not one.ndim for one in tensors_in(args, kwargs))
    if len(written) == 1 and first is args[0] and name in ROW_BY_ROW and by_rows(first) and alike:
        rows = _mapped(lambda one: one if isinstance(one, DTensor) or not one.ndim else cut(first, one), args, kwargs)
        return plainly(func, types, *rows)
    return _written_whole(func, written, args, kwargs)


@torch.no_grad()
def _written_whole(func: Any, written: list[DTensor], args: Any, kwargs: Any) -> Any:
    wholes: dict[int, torch.Tensor] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and id(tensor) not in wholes:
            wholes[id(tensor)] = put_together(tensor)
        return wholes.get(id(tensor), tensor)

    whole_args, whole_kwargs = _mapped(whole, args, kwargs)
    func(*whole_args, **whole_kwargs)
    for one in written:
        one.copy_(replicated(wholes[id(one)].to(one.device_mesh.device_type), one))
    return kwargs["out"] if kwargs.get("out") is not None else args[0]


def _refuse_differing(name: str, args: Any, kwargs: Any) -> None:
    found = list(tensors_in(args, kwargs))
    device = next((one.device_mesh.device_type for one in found if isinstance(one, DTensor)), "cpu")
    if any(differing([one for one in found if not isinstance(one, DTensor) and one.ndim], device)):
        raise NotSupported(DIFFERS.format(name))


def _set(func: Any, args: Any) -> Any:
    """`p.grad = tensor`: each rank takes its part of it."""
    tensor, value = args
    if (
        func == _SET_GRAD
        and isinstance(tensor, DTensor)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.shape == tensor.shape
        and value.dtype == tensor.dtype
        and by_rows(tensor)
    ):
        _refuse_differing("p.grad = tensor", (value, tensor), {})
        piece = cut(tensor, value)
        given_memory.note(tensor, "grad", value, local_part(piece))
        return tensor, piece
    return args


_SET_GRAD = getattr(torch.Tensor, "grad").__set__  # noqa: B009 — mypy takes it for a tensor


def _data(old: property) -> property:
    return property(old.fget, lambda tensor, value: _put_there(old, tensor, value))


@torch.no_grad()
def _put_there(old: property, tensor: DTensor, value: Any) -> None:
    """`p.data = value`. Collective where the value is an ordinary tensor, or divided in another way. One in pieces is
    shared, as in one process; of an ordinary one each rank has a copy of its part."""
    if (
        local_part(tensor).is_meta
        or not isinstance(value, torch.Tensor)
        or (isinstance(value, DTensor) and value.dtype != tensor.dtype)
    ):
        old.fset(tensor, value)  # type: ignore[misc]  # a property of torch's that can be set
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise NotSupported(OTHER.format(tuple(value.shape), value.dtype, tuple(tensor.shape), tensor.dtype))
    if isinstance(value, DTensor):
        wrote(value)
        dtensor_operations.fresh(value)
    if isinstance(value, DTensor) and value.placements == tensor.placements:
        dtensor_operations.give(tensor, local_part(value))
        return
    whole = value
    if not isinstance(value, DTensor):
        _refuse_differing("p.data = tensor", (value, tensor), {})
        value = replicated(value.to(tensor.device_mesh.device_type), tensor)
    dtensor_operations.give(tensor, local_part(value.redistribute(placements=tensor.placements)).clone())
    if whole is not value:
        given_memory.note(tensor, "data", whole, local_part(tensor))


# --- functions of the tensor's memory ---------------------------------------------------------------


def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    """The memory of the whole tensor, read-only: what is written to it would be lost."""
    tensor = args[0]
    found = func(put_together(tensor).requires_grad_(tensor.requires_grad), *args[1:], **kwargs)
    if hasattr(found, "flags"):
        found.flags.writeable = False
    return found


_wholes: Any = WeakTensorKeyDictionary()
"""this rank's part of a tensor → its whole, which lives as long, or until the cell ends"""


def forget() -> None:
    """A cell has ended: nobody reads any more at the addresses that it has asked for."""
    _wholes.clear()
    given_memory.forget()


def _address(func: Any, args: Any, kwargs: Any) -> Any:
    """Libraries that read memory by its address (safetensors) read the whole, which stays where it is."""
    tensor, now = args[0], put_together(args[0])
    whole = _wholes.setdefault(local_part(tensor), now)
    if whole is not now:
        whole.copy_(now)
    return func(whole, *args[1:], **kwargs)


def _in_the_shape(name: str) -> Function:
    """A view of this tensor, in the shape of another one."""
    return lambda func, args, kwargs: getattr(args[0], name)((*args[1:], *kwargs.values())[0].shape)


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


_SPECIAL: dict[str, Function] = {
    **dict.fromkeys(OF_MEMORY, _memory),
    **dict.fromkeys(ADDRESSES, _address),
    "new": lambda func, args, kwargs: func(local_part(args[0]), *args[1:], **kwargs),
    "backward": lambda func, args, kwargs: func(whole_of(args[0]), *args[1:], **kwargs),
    "__deepcopy__": _deepcopy,
    "view_as": _in_the_shape("view"),
    "expand_as": _in_the_shape("expand"),
    "reshape_as": _in_the_shape("reshape"),
}
