"""Decides which rank writes what of a checkpoint, and copies that to host memory.

What every rank has whole is written by one of them, the bytes spread evenly. What is kept in pieces is written by who
keeps it; of several that keep the same, by the first. So nobody ever holds more than it does already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from nbtrain.errors import NbtrainError
from nbtrain.strategies.base import Piece

Range = tuple[int, int]
"""(start, stop) in the flattened whole"""
Kept = Mapping[str, Sequence[Range]]
"""key → what a rank keeps of it"""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as the notebook has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankPart:
    """A stretch of a flattened tensor, in host memory."""

    key: str
    start: int
    data: torch.Tensor


@dataclass(slots=True)
class Holdings:
    """What this rank has of the content, after `leave`."""

    tensors: Mapping[str, torch.Tensor]
    pieces: dict[str, Piece] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], pieces: Iterable[tuple[torch.Tensor, Piece]]) -> Holdings:
        by_id = {id(tensor): piece for tensor, piece in pieces}
        return cls(tensors, {key: by_id[id(tensor)] for key, tensor in tensors.items() if id(tensor) in by_id})

    def described(self) -> dict[str, Described]:
        found = {}
        for key, tensor in self.tensors.items():
            piece = self.pieces.get(key)
            found[key] = Described(tuple(tensor.shape if piece is None else piece.shape), (piece or tensor).dtype)
        return found

    def kept(self) -> dict[str, list[Range]]:
        return {key: [(int(a), int(b)) for a, b in piece.ranges()] for key, piece in self.pieces.items()}


def owners(described: Mapping[str, Described], kept: Sequence[Kept]) -> list[dict[str, list[Range]]]:
    """What each rank writes; the same result on every rank."""
    mine: list[dict[str, list[Range]]] = [{} for _ in kept]
    load = [0] * len(kept)
    in_pieces = {key for one in kept for key in one}
    for key in in_pieces & described.keys():
        one = described[key]
        taken: list[Range] = []
        for rank, ranges in enumerate(kept):
            fresh = [part for held in ranges.get(key, ()) for part in _without(held, taken)]
            if fresh:
                mine[rank][key] = fresh
                taken += fresh
                load[rank] += sum(b - a for a, b in fresh) * one.dtype.itemsize
        if sum(b - a for a, b in taken) != one.numel:
            raise NbtrainError(
                f"{key}: of its {one.numel:,} numbers the ranks keep {sum(b - a for a, b in taken):,} only. "
                "The strategy does not say where the others are, so this cannot be saved"
            )
    for key in sorted(described.keys() - in_pieces, key=lambda key: (-described[key].nbytes, key)):
        if described[key].numel:
            rank = load.index(min(load))
            mine[rank][key] = [(0, described[key].numel)]
            load[rank] += described[key].nbytes
    return mine


def _without(held: Range, taken: Iterable[Range]) -> list[Range]:
    """What is left of `held` without `taken`."""
    left = [held] if held[1] > held[0] else []
    for a, b in taken:
        left = [part for c, d in left for part in ((c, min(d, a)), (max(c, b), d)) if part[1] > part[0]]
    return left


@torch.no_grad()
def snapshot(holdings: Holdings, mine: Mapping[str, Sequence[Range]]) -> list[RankPart]:
    """Copies of what this rank writes: the training goes on while they are written."""
    found = []
    for key, ranges in mine.items():
        piece = holdings.pieces.get(key)
        if piece is None:
            data = holdings.tensors[key].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            found.append(RankPart(key, 0, data.reshape(-1)))
            continue
        for (a, b), data in zip(piece.ranges(), piece.read(), strict=True):
            for start, stop in ranges:
                if a <= start and stop <= b:
                    part = data.detach()[start - a : stop - a]
                    found.append(RankPart(key, start, part.to(device="cpu", dtype=piece.dtype, copy=True)))
    return found
