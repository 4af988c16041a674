"""DTensor: a rank's part of it, and where torch moves rows between ranks. Torch is imported only when it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbtrain.compat.internals import Internals, find

if TYPE_CHECKING:
    import torch

its = Internals("torch")

LOCAL = "_local_tensor"
"""The attribute that holds a rank's part."""
its.members("torch.distributed.tensor.DTensor", "_op_dispatcher")
its.fields("torch.distributed.tensor.DTensor", LOCAL)

MOVERS = tuple(
    f"torch.distributed.tensor.{name}.redistribute_local_tensor" for name in ("_redistribute", "_dispatch", "_api")
)
"""The function that moves rows between ranks, under its name in each module that uses it."""

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
    return isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in str(error)


def read_numbers_by(complete: Callable[[Any], torch.Tensor]) -> Any:
    """Have `tensor.item()`, `float(tensor)` and the like read what `complete` makes of the tensor. Returns a handle as
    of a hook; None where torch has no table for that, so that its methods have to be replaced."""
    from torch.distributed.tensor import DTensor

    from nbtrain.compat.fake_tensors import READS_A_NUMBER

    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict) or READS_A_NUMBER in handlers:
        return None
    handlers[READS_A_NUMBER] = lambda op, args, kwargs: op(complete(args[0]))

    return SimpleNamespace(remove=lambda: handlers.pop(READS_A_NUMBER, None))


def pose_with_local(tensor: Any, part: torch.Tensor) -> None:
    """Make a whole tensor answer with this part where a rank's part is asked for."""
    tensor._local_tensor = part


# --- operations that are computed in another way ----------------------------------------------------

RANDOM = (
    "normal_", "uniform_", "bernoulli_", "bernoulli", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_",
    "native_dropout", "rand_like", "randn_like", "randint_like", "normal", "poisson", "multinomial", "rrelu_with_noise",
)  # fmt: skip
"""operations of aten that draw random numbers"""
NEW = ("new_empty", "new_zeros", "new_ones", "new_full")
ROWS = (
    "select", "slice", "unbind", "view", "_unsafe_view", "split", "split_with_sizes", "diagonal", "unfold", "squeeze",
    "expand",
)  # fmt: skip
"""operations whose result shows a part of a tensor, or has its memory in another shape; torch may copy it"""
SHOWING = (
    "alias", "detach", "permute", "t", "transpose", "unsqueeze", "_reshape_alias", "view_as_real",
    "view_as_complex", "_conj", "_neg_view",
)  # fmt: skip
"""operations whose result shows the same memory, always"""
WITHOUT_RULE = (
    "index_put_", "index_fill_", "index_add_", "index_copy_", "scatter_", "masked_scatter_", "renorm_", "triu_",
    "fill_diagonal_", "nonzero", "masked_select", "_unique2", "_cdist_forward", "index_put",
    "tril_", "eye", "fill_.Tensor",
)  # fmt: skip
"""operations that torch does not compute by pieces, in some cases or in all"""

RIGHT_BY_PIECES = frozenset({
    *RANDOM, *NEW, "clone", "zeros_like", "ones_like", "full_like", "empty_like", "sum", "mean", "norm",
    "linalg_vector_norm", "dropout", "gumbel_softmax",
})  # fmt: skip
"""Functions that torch computes rightly where ranks have different numbers of rows, besides those that work number by
number and those that show a tensor in another shape; and draws, which are made for the whole (`RANDOM`)."""

NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm"})
"""Names of functions whose argument says which norm."""


@functools.cache
def brings_rows_together(func: Callable[..., Any]) -> bool:
    """Whether a function of torch makes something new of numbers in different places. By pieces that is wrong, or fails
    on some of the ranks, where ranks have different numbers of rows: a loss's mean, the largest of no numbers."""
    import torch

    name = func.__name__
    if name in RIGHT_BY_PIECES or name.startswith("_foreach_"):
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return isinstance(func, FunctionType) and func.__module__ in ("torch.functional", "torch.nn.functional")
    schemas = {op: op._schema for op in (getattr(packet, one) for one in packet.overloads())}
    makes = {op: schema.returns for op, schema in schemas.items() if not schema.is_mutable and _tensors(schema.returns)}
    simple = any(torch.Tag.pointwise in op.tags or any(one.alias_info for one in found) for op, found in makes.items())
    return bool(makes) and (name in ("max", "min") or not simple)


def _tensors(returns: Any) -> bool:
    return any("Tensor" in str(one.type) for one in returns)


def compute_by(names: tuple[str, ...], compute: Callable[[Any, Any, Any], Any]) -> Any:
    """Compute aten's operations of these names on DTensors by `compute(op, args, kwargs)`; returns a handle as of a
    hook. `fill_.Tensor`: this overload only."""
    import torch
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    ops = []
    for packet, _, overload in (name.partition(".") for name in names):
        if hasattr(torch.ops.aten, packet):
            found = getattr(torch.ops.aten, packet)
            ops += [getattr(found, one) for one in ([overload] if overload else found.overloads())]
    ours = [op for op in ops if op not in handlers]
    for op in ours:
        handlers[op] = compute

    def remove() -> None:
        for op in ours:
            handlers.pop(op, None)

    return SimpleNamespace(remove=remove)


def plainly(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute the operation as torch itself does, without the handler that replaces it."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operation writes to."""
    found = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs[argument.name] if argument.kwarg_only else args[place] if place < len(args) else None)
    return found


def writing_operations() -> tuple[str, ...]:
    """Names of the operations of aten that write to the tensor they are called on."""
    import torch

    return tuple(name for name in dir(torch.ops.aten) if name.endswith("_") and not name.startswith("_"))
