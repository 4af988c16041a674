"""Where a parameter's numbers are on this rank: its share, as a stretch of the flattened whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbtrain.compat import deepspeed as ds
from nbtrain.strategies.base import Piece


@dataclass(slots=True)
class Share:
    """`start:stop` of the flattened parameter is `at:at + stop - start` of the flat piece number `flat`."""

    start: int
    stop: int
    flat: int
    at: int


class EngineLayout:
    """The engine's own tables, in one form for all stages."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.zero = engine.optimizer
        self.stage = stage
        self.cut = object()
        self.shares: dict[int, Share] = dict(self._three() if stage == 3 else self._one_two())
        """by id of the parameter"""

    @property
    def flats(self) -> list[torch.Tensor]:
        """The pieces that are stepped, in full precision."""
        zero = self.zero
        found: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return found

    def members(self, flat: int) -> list[torch.Tensor]:
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return list(groups[flat])

    def swapped(self, flat: int) -> bool:
        """It is on a disk."""
        return self.stage == 3 and ds.is_on_disk(self.zero, flat)

    def _one_two(self) -> Iterator[tuple[int, Share]]:
        zero = self.zero
        for flat in range(len(zero.round_robin_bit16_groups)):
            size = int(zero.partition_size[flat])
            begin = size * torch.distributed.get_rank(zero.real_dp_process_group[flat])
            for p, offset in ds.in_order(zero, flat):
                start = min(max(begin - offset, 0), p.numel())
                stop = max(start, min(begin + size - offset, p.numel()))
                yield id(p), Share(start, stop, flat, offset + start - begin if stop > start else 0)

    def _three(self) -> Iterator[tuple[int, Share]]:
        zero = self.zero
        for members in zero.fp16_groups:
            for p in members:
                flat, at, _ = zero.grad_position[zero.get_param_id(p)]
                start, stop = stretch(p)
                yield id(p), Share(start, stop, flat, at)


def stretch(p: Any) -> tuple[int, int]:
    """What of a parameter of stage 3 this rank keeps."""
    size = p.ds_tensor.ds_numel
    start = min(size * p.ds_zero_partition_rank, p.ds_numel)
    return start, min(start + size, p.ds_numel)


class SharePart(Piece):
    """A stretch of a whole: who keeps it says how it is reached."""

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        stretch: tuple[int, int],
        read: Callable[[], torch.Tensor],
        fill: Callable[[torch.Tensor], None],
        cut: object,
    ) -> None:
        self.shape, self.dtype, self.cut = shape, dtype, cut
        self._stretch, self._read, self._fill = stretch, read, fill

    def ranges(self) -> Sequence[tuple[int, int]]:
        start, stop = self._stretch
        return [(start, stop)] if stop > start else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self._read().to(self.dtype)] if self.ranges() else []

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        self._fill(whole.reshape(-1))
