"""What is known of functions of torch that are given tensors in pieces: by lists, and by torch's own schemas."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nbtrain.compat import dtensor, tensors

FORM = frozenset({
    "__delete__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "__setstate__", "can_cast",
    "dim", "dim_order", "element_size", "get_device", "grad", "is_complex", "is_conj", "is_contiguous",
    "is_distributed",
    "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed", "nelement",
    "ndimension", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type",
    "retain_grad", "size", "storage_offset", "stride",
} | tensors.ASKS_OF_FORM)  # fmt: skip
"""Functions that read no numbers; and torch.autograd.grad, whose inputs are these very tensors."""
SHOWING = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""attributes that are views"""
OPERATORS = frozenset({
    "abs", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "rdiv", "idiv", "truediv",
    "rtruediv", "itruediv", "floordiv", "rfloordiv", "ifloordiv", "mod", "rmod", "imod", "pow", "rpow", "ipow", "neg",
    "pos", "eq", "ne", "lt", "le", "gt", "ge", "and", "rand", "iand", "or", "ror", "ior", "xor", "rxor", "ixor",
    "invert",
})  # fmt: skip
"""elementwise, between two underscores on each side"""
WRITES_TOO = frozenset({f"__{name}__" for name in OPERATORS if name[0] == "i" and name != "invert"} | {"__setitem__"})
BY_PIECES = frozenset({
    "absolute", "absolute_", "alias", "bfloat16", "bool", "byte", "char", "clone", "contiguous", "copy_", "cpu", "cuda",
    "detach", "detach_", "divide", "divide_", "double", "empty_like", "fill_", "float", "full_like", "greater",
    "greater_equal", "half", "int", "less", "less_equal", "long", "masked_fill_", "multiply", "multiply_", "negative",
    "negative_", "not_equal", "ones_like", "short", "subtract", "subtract_", "to", "true_divide_", "type", "type_as",
    "zero_", "zeros_like",
})  # fmt: skip
"""besides those that torch says are elementwise"""
OF_LISTS = tensors.OF_LISTS
"""how names of such functions begin, by which optimizers step all tensors at once"""
NOT_BY_PIECES = frozenset({tensors.MAX_OF_EACH, tensors.NORM_OF_EACH, "equal", "max", "min"})
"""which are called as if they were elementwise"""
SUMS = frozenset({"sum", "norm", "linalg_vector_norm", tensors.NORM_OF_EACH})
"""of all numbers: each rank sums its own"""
FOLLOWED = frozenset(
    {"square", "pow", "abs", "neg", "sum", "mul", "add", "sub", "div", "rmul", "radd", "rsub", "truediv"}
)
"""what autograd follows by pieces; through all others it goes by the whole"""
READS = frozenset({
    "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__getitem__", "__index__", "__int__",
    "__matmul__", "__reversed__", "__rmatmul__", "item", "unique",
})  # fmt: skip
"""makes something new, besides what torch's schemas say"""
MODULES = "torch.functional", "torch.nn.functional"
"""whose functions make something new"""
CONVERTS = frozenset({"bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short", "type"})
"""may give the tensor itself"""
RESHAPES = frozenset({"__getitem__", "expand", "flatten", "reshape", "view"})
"""may change nothing"""
ASKS = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})
"""Functions that ask another tensor for its form."""


NORMS = frozenset({"batch_norm", "instance_norm"})
"""write to their running statistics, which neither torch's schemas tell nor the versions of tensors"""


class Known(NamedTuple):
    """What is known of a function."""

    by_pieces: bool
    sums: bool
    followed: bool
    draws: bool
    """random numbers, of which the ranks draw the same"""
    shows: bool
    makes: bool
    written: tuple[tuple[int, str], ...]
    """(position, name) of the arguments that it writes to, besides `out` and what `inplace=True` means"""
    below: bool
    """an operation of aten, which a mode that sees each (a count of operations) has called again"""
    starts: bool
    """a function of torch.nn.init, which writes to a parameter"""
    in_form: bool
    """what it writes to keeps its form"""
    number: int
    """of its name: ranks compare what they have written, also where no number is given to it (`p.data.zero_()`)"""


@functools.cache
def known(func: Callable[..., Any]) -> Known:
    name, module = getattr(func, "__name__", ""), str(getattr(func, "__module__", ""))
    base = name[2:-2] if name[:2] == "__" else name
    own = dtensor.facts(name)
    python, starts = module in MODULES, module == "torch.nn.init"
    by_pieces = name in BY_PIECES or name.startswith(OF_LISTS) or (base != name and base in OPERATORS)
    in_place = name in WRITES_TOO or (name[-1:] == "_" and name[-2:] != "__")
    places = () if name in FORM else own.written or (((0, ""),) if in_place else ())
    if name in NORMS:
        places = ((1, "running_mean"), (2, "running_var")) if python else ((3, "running_mean"), (4, "running_var"))
    by_pieces = (by_pieces or (own.elementwise and not own.draws)) and name not in NOT_BY_PIECES
    return Known(
        by_pieces=by_pieces,
        sums=name in SUMS,
        followed=base in FOLLOWED,
        draws=own.draws or python or starts,
        shows=own.shows or name in CONVERTS or name == "__getitem__",
        makes=own.makes or by_pieces or python or name in READS,
        written=tuple((at, argument if at else "tensor" if starts else "input") for at, argument in places),
        below=hasattr(func, "overloadpacket"),
        starts=starts,
        in_form=own.writes or by_pieces or starts or name == "__setitem__" or name in NORMS,
        number=zlib.crc32(name.encode()),
    )


def written(what: Known, args: Any, kwargs: Any, kind: Any) -> list[Any]:
    """The tensors of this class that a call writes to. Fast, as an optimizer's step comes here many times."""
    places: list[Any] = []
    only_reads = kwargs.get("training") is False or kwargs.get("use_input_stats") is False  # running statistics
    for position, name in () if only_reads else what.written:
        places.append(args[position] if position < len(args) else kwargs.get(name))
    if kwargs:
        places.append(kwargs.get("out"))
        if args and kwargs.get("inplace"):
            places.append(args[0])
    tensors_written: list[Any] = []
    for operand in places:
        for tensor in operand if isinstance(operand, list | tuple) else (operand,):
            if isinstance(tensor, kind):
                tensors_written.append(tensor)
    return tensors_written
