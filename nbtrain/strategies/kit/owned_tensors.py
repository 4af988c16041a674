"""Tensors that are whole on one rank, their owner; the others have a stand-in of the same shape over one number.

A stand-in answers what asks for its form. What reads its numbers or writes to them is for each class to say: a
gradient's refuses, and can be zeroed; that of an optimizer's state (sharded_state.py) can be copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.base import Piece

G = TypeVar("G", bound="GradientStandIn")

ANSWERED = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_leaf",
        "requires_grad", "grad_fn", "grad", "size", "dim", "numel", "nelement", "stride",
        "is_floating_point", "is_complex", "element_size", "is_contiguous", "__hash__", "__len__", "get_device",
        "output_nr", "retains_grad", "is_quantized", "is_mkldnn", "is_nested",
        "is_inference", "names", "is_mps", "is_xpu",
        # what a search for memory asks everything it finds
        "untyped_storage", "storage_offset", "data_ptr", "nbytes", "itemsize", "is_pinned", "is_shared",
    } | tensors.ASKS_OF_FORM
)  # fmt: skip
"""Functions of a tensor, as `__torch_function__` is told their names, that a stand-in answers as the whole does."""

OF_LAYOUT = frozenset({"stride", "is_contiguous"})
"""those that ask how the numbers lie in memory: answered for an ordinary tensor of this shape"""


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """One of this shape, without numbers, that lies in memory as an ordinary tensor does."""
    return torch.empty(tensor.shape, device="meta")


def stand_in(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, one number in memory: NaN, so that computing with it shows."""
    empty = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), empty, dtype=like.dtype, device=like.device).expand(like.shape)


class OwnedTensor(Piece):
    """A tensor that is whole on its owner. `mine`: this rank has the whole; `speaks`: it is the owner, or the first of
    several; `cut`: who dealt it out; `everywhere`: it is whole on the others, too."""

    def __init__(
        self, tensor: torch.Tensor, mine: bool, speaks: bool, cut: object = None, everywhere: bool = False
    ) -> None:
        self.shape, self.dtype, self.cut, self.everywhere = tensor.shape, tensor.dtype, cut, everywhere
        self.tensor, self._mine, self._speaks = tensor, mine, speaks

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(0, self.shape.numel())] if self._speaks else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self.tensor.detach().reshape(-1)] if self._speaks else []

    @torch.no_grad()
    def fill(self, full: torch.Tensor) -> None:
        new = full.view(self.shape).to(self.tensor.device)
        # A backward that is to come takes a copy for an edit: weights may have been read between it and its forward.
        if self._mine and not (self.everywhere and torch.equal(self.tensor, new)):
            self.tensor.copy_(new)


def full_tensor(piece: Piece, wire: torch.device, full: torch.Tensor | None = None) -> torch.Tensor:
    """The whole of what ranks keep in pieces, sent from the device `wire`; `full`: flat zeros that it is written to.
    Collective: no two ranks speak for one number, so a sum of their bytes is the whole."""
    if full is None:
        full = torch.zeros(piece.shape.numel(), dtype=piece.dtype, device=wire)
    for (start, stop), part in zip(piece.ranges(), piece.read(), strict=True):
        full[start:stop].copy_(part)
    here = full.view(torch.uint8)
    there = here.to(wire)
    if there.numel() and dist.is_initialized():  # else one process has it all
        dist.all_reduce(there)
        here.copy_(there)
    return full.view(piece.shape)


def dealt_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Who owns what, so that each has about as much: the largest first, to whom has least. The same on every rank."""
    load = [0] * owners
    owner_of = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner_of[i] = load.index(min(load))
        load[owner_of[i]] += sizes[i]
    return owner_of


# --- stand-ins -------------------------------------------------------------------------------------


class StandIn(torch.Tensor):
    """Answers what asks for its form. `asked` decides about every other function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(ordinary(args[0]) if name in OF_LAYOUT else args[0], *args[1:], **kwargs)
        return cls.asked(func, name, args, kwargs)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class GradientStandIn(StandIn):
    """Stands in the place of `p.grad`. It can be zeroed; what reads it raises."""

    text: ClassVar[str]
    """how it is printed: "a gradient that another rank has" """
    refusal: ClassVar[str]
    """the error where its numbers are read or written"""

    @classmethod
    def of(cls: type[G], p: torch.Tensor, dtype: torch.dtype | None = None) -> G:
        """A stand-in of the parameter's shape, with one number in memory."""
        return torch.zeros((), dtype=dtype or p.dtype, device=p.device).expand(p.shape).as_subclass(cls)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__repr__", "__format__"):
            return f"<{cls.text}, {tuple(args[0].shape)}>"
        if name in ("zero_", "detach_", "requires_grad_"):  # the last two on the way to being zeroed
            return args[0]
        if name in MOVES and stays(func, args, kwargs):
            return args[0]
        if name == "__set__" and args[0] is args[1]:  # p.grad.data = p.grad.to(…), as `model.to` has it
            return None
        raise NotSupported(cls.refusal)


MOVES = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"})


def stays(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this `.to(…)`, `.float()` or the like would leave the tensor on its device and in its dtype."""
    with tensors.as_plain_tensors():
        tensor = args[0]
        empty = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        result = func(empty, *args[1:], **kwargs)
        return isinstance(result, torch.Tensor) and (result.dtype, result.device) == (tensor.dtype, tensor.device)
