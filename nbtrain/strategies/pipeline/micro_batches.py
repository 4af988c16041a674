"""A batch cut into micro-batches, and what came of them put together.

The batch is dimension 0. A tensor that is given and has another size there (a mask) goes to every micro-batch whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nbtrain.compat import pytree
from nbtrain.errors import NotSupported

OTHERWISE = (
    "{name} returns something else for one micro-batch than for another, and under pipeline what it returns for all of "
    "them is put together: let it return the same things for every batch, write --microbatches 1, or use --strategy ddp"
)


@dataclass(slots=True)
class Cut:
    """How a batch is cut."""

    sizes: list[int]
    """of the micro-batches; [0] where nothing says how large the batch is"""

    @classmethod
    def of(cls, leaves: list[Any], wanted: int, ranks: int) -> Cut:
        """`wanted`: micro-batches; 0: four for each rank, if that leaves two samples for each."""
        batch = next((t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim()), 0)
        count = min(wanted or max(1, min(4 * ranks, batch // 2)), batch)
        if count <= 1:
            return cls([batch])
        small, more = divmod(batch, count)
        return cls([small + (i < more) for i in range(count)])

    @property
    def batch(self) -> int:
        return sum(self.sizes)

    def apply(self, leaf: Any) -> list[Any]:
        """One argument of the model, for each micro-batch."""
        whole = not (isinstance(leaf, torch.Tensor) and self.cuts(leaf))
        return [leaf] * len(self.sizes) if whole else list(leaf.split(self.sizes))

    def joins(self, parts: list[list[torch.Size]], whole: list[torch.Size]) -> bool:
        """Whether tensors of these shapes, of each micro-batch, make up those of the whole batch."""
        wanted = [[(size, *shape[1:]) if shape else () for shape in whole] for size in self.sizes]
        fit = all(shape and shape[0] == self.batch for shape in whole)
        return fit and [[tuple(shape) for shape in part] for part in parts] == wanted

    def cuts(self, leaf: torch.Tensor) -> bool:
        """Not what is sparse, as a graph's adjacency: it belongs to all of a batch."""
        strided = leaf.layout is torch.strided
        return len(self.sizes) > 1 and strided and leaf.dim() > 0 and leaf.shape[0] == self.batch


@dataclass(slots=True)
class Joined:
    """What the micro-batches returned, as one."""

    output: Any
    differ: list[bool]
    """which of its leaves have a gradient"""

    @property
    def leaves(self) -> list[Any]:
        found: list[Any] = pytree.tree_leaves(self.output)
        return found


def join(parts: list[Any], cut: Cut, name: str) -> Joined:
    """`parts`: what the model returned for each micro-batch."""
    flat = [pytree.tree_flatten(part) for part in parts]
    if any(tree != flat[0][1] for _, tree in flat):
        raise NotSupported(OTHERWISE.format(name=name))
    leaves: list[Any] = []
    differ = []
    for column in zip(*(found for found, _ in flat), strict=True):
        tensors = [isinstance(leaf, torch.Tensor) for leaf in column]
        if any(tensors) and not all(tensors):
            raise NotSupported(OTHERWISE.format(name=name))
        differ.append(tensors[0] and any(t.requires_grad for t in column))
        leaves.append(_join(column, cut, name) if tensors[0] else column[0])
    return Joined(pytree.tree_unflatten(leaves, flat[0][1]), differ)


def _join(column: tuple[Any, ...], cut: Cut, name: str) -> torch.Tensor:
    pieces: list[torch.Tensor] = [t.detach() for t in column]
    if len(pieces) == 1:
        return pieces[0].clone()
    rows = all(t.dim() and t.shape[0] == size for t, size in zip(pieces, cut.sizes, strict=True))
    if rows and len({t.shape[1:] for t in pieces}) == 1:
        return torch.cat(pieces)
    raise NotSupported(
        f"{name} returns a tensor of the shape {tuple(pieces[0].shape)} for {cut.sizes[0]} samples, and under pipeline "
        "what it returns for several micro-batches is put together along dimension 0, which is to be that of the "
        "batch: write --microbatches 1, or use --strategy ddp"
    )


def shares(cut: Cut) -> list[float]:
    """What each micro-batch counts in an average."""
    return [size / cut.batch for size in cut.sizes] if cut.batch else [1.0]


def gradients(grads: list[Any], cut: Cut) -> list[list[Any]]:
    """The gradients of each micro-batch's outputs, from those of the whole batch."""
    columns: list[list[Any]] = []
    for grad in grads:
        if grad is None:
            columns.append([None] * len(cut.sizes))
        else:
            columns.append([grad] if len(cut.sizes) == 1 else list(grad.split(cut.sizes)))
    return [[column[i] for column in columns] for i in range(len(cut.sizes))]
