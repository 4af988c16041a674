"""Tensors that are whole on one rank, their owner; the other ranks have the same shape over memory of one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbtrain.compat import tensors
from nbtrain.strategies.base import Piece

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


def name_of(func: Any) -> str:
    """A function's, as `__torch_function__` is told it; of a getter its property's."""
    name: str = func.__name__
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def stand_in(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, one number in memory: NaN, so that computing with it shows."""
    empty = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), empty, dtype=like.dtype, device=like.device).expand(like.shape)


class OwnedTensor(Piece):
    """`get` gives the tensor that this rank has in its place; `speaks`: it is the owner, or the first of several."""

    def __init__(self, get: Callable[[], torch.Tensor], mine: bool, speaks: bool) -> None:
        tensor = get()
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._get, self._mine, self._speaks = get, mine, speaks

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(0, self.shape.numel())] if self._speaks else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self._get().detach().reshape(-1)] if self._speaks else []

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        if self._mine:
            self._get().copy_(whole.view(self.shape))


def dealt_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Who owns what, so that each has about as much: the largest first, to whom has least. The same on every rank."""
    load = [0] * owners
    found = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = load.index(min(load))
        load[found[i]] += sizes[i]
    return found
