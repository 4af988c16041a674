"""The tables of DeepSpeed's optimizers, in one form for all stages: where numbers of parameters and gradients lie.

DeepSpeed has no functions to multiply the gradients that it holds, to take their norm before the step, to throw them
away, or to forget a backward that was cut short. They are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import deepspeed as ds
from nbtrain.strategies.base import Piece


@dataclass(slots=True)
class Share:
    """`start:stop` of the flattened parameter is `at:at + stop - start` of the flat piece number `flat`."""

    start: int
    stop: int
    flat: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class EngineLayout:
    """Of one engine's optimizer, `zero`."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.zero = engine.optimizer
        self.stage = stage
        self.cut = object()
        self.shares: dict[int, Share] = dict(self._shares_stage_3() if stage == 3 else self._shares_stages_1_2())
        """by id of the parameter"""
        self._held: dict[int, int] = dict(self._held_stage_3() if stage == 3 else self._held_stages_1_2())
        """by id of the parameter: where its gradient begins in stage 3's buffer; which one of its group's it is"""

    # --- parameters --------------------------------------------------------------------

    @property
    def flats(self) -> list[torch.Tensor]:
        """The pieces that are stepped, in full precision."""
        zero = self.zero
        tensors: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return tensors

    def members(self, flat: int) -> list[torch.Tensor]:
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return list(groups[flat])

    def size(self, flat: int) -> int:
        sizes = self.zero.fp16_partitioned_groups_flat_numel if self.stage == 3 else self.zero.partition_size
        return int(sizes[flat])

    def swapped(self, flat: int) -> bool:
        """It is on a disk."""
        return self.stage == 3 and ds.is_on_disk(self.zero, flat)

    @contextmanager
    def at_hand(self, flat: int, write: bool = True) -> Iterator[None]:
        """A piece that is on a disk, and its optimizer's state, are read for as long as they are needed; `write`: and
        written back."""
        if self.swapped(flat):
            ds.read_from_disk(self.zero, flat)
        try:
            yield
        finally:
            if self.swapped(flat):
                leave = ds.write_to_disk if write else ds.leave_on_disk
                leave(self.zero, flat)

    def piece(
        self,
        share: Share,
        shape: torch.Size,
        dtype: torch.dtype,
        flat: Callable[[], torch.Tensor],
        filled: Callable[[torch.Tensor], None] = lambda full: None,
    ) -> SharePart:
        """`flat`: gives the flat piece in which the share lies. `filled`: called after the share was taken out of a
        whole."""

        def stretch() -> torch.Tensor:
            return flat().narrow(0, share.at, share.size)

        def read() -> torch.Tensor:
            with self.at_hand(share.flat, write=False):
                return stretch().clone() if self.swapped(share.flat) else stretch()

        def fill(full: torch.Tensor) -> None:
            with self.at_hand(share.flat):
                stretch().copy_(full[share.start : share.stop])
            filled(full)

        return SharePart(shape, dtype, (share.start, share.stop), read, fill, self.cut)

    def _shares_stages_1_2(self) -> Iterator[tuple[int, Share]]:
        zero = self.zero
        for flat in range(len(zero.round_robin_bit16_groups)):
            size = int(zero.partition_size[flat])
            begin = size * dist.get_rank(zero.real_dp_process_group[flat])
            for p, offset in ds.in_order(zero, flat):
                start = min(max(begin - offset, 0), p.numel())
                stop = max(start, min(begin + size - offset, p.numel()))
                yield id(p), Share(start, stop, flat, offset + start - begin if stop > start else 0)

    def _shares_stage_3(self) -> Iterator[tuple[int, Share]]:
        zero = self.zero
        for members in zero.fp16_groups:
            for p in members:
                flat, at, _ = zero.grad_position[zero.get_param_id(p)]
                start, stop = stretch(vars(p))
                yield id(p), Share(start, stop, flat, at)

    def part(self, p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share of a parameter, in something that is as long as the flat piece."""
        share = self.shares[id(p)]
        return flat.narrow(0, share.at, share.size)

    # --- gradients ---------------------------------------------------------------------

    def _held_stage_3(self) -> Iterator[tuple[int, int]]:
        at = 0
        for members in self.zero.fp16_groups:
            for p in members:
                yield id(p), at
                at += vars(p)["ds_tensor"].ds_numel

    def _held_stages_1_2(self) -> Iterator[tuple[int, int]]:
        for members in self.zero.params_in_partition:
            yield from ((id(p), number) for number, p in enumerate(members))

    def gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a gradient that the ranks have averaged, flat, to read and to write; None: it has no
        part. Under stage 1 they average at the end of gathering gradients."""
        zero, share = self.zero, self.shares[id(p)]
        size, number = share.size, self._held.get(id(p))
        if not size or number is None:
            return None
        flat: torch.Tensor
        if self.stage == 3:
            flat = zero.grad_partitions_flat_buffer[number : number + size]
        elif self.stage == 1 and zero.cpu_offload:
            flat = zero.single_partition_of_fp32_groups[share.flat].grad[share.at : share.at + size]
        elif ds.is_in_one_piece(zero, share.flat):
            flat = zero.averaged_gradients[share.flat].flat_partition[share.at : share.at + size]
        elif self.stage == 1:  # in order, with what fills gaps
            at = 0
            for flat in zero.averaged_gradients[share.flat]:
                if at == share.at and flat.numel() == size:
                    break
                at += flat.numel()
        elif zero.cpu_offload:
            flat = zero.accumulated_grads_in_cpu[zero.get_param_id(p)]
        else:
            flat = zero.all_grad_tensors[share.flat][number]
        if flat.device != p.device:
            torch.cuda.synchronize(p.device)  # it comes while the backward goes on
        flat = flat.detach().view(-1)
        return flat if flat.numel() == size else flat[share.start : share.stop]

    def wrote_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Of offloaded gradients stage 1 has taken the norms already."""
        if self.stage == 1 and self.zero.cpu_offload:
            for p in parameters:
                if (part := self.gradient(p)) is not None:
                    self.zero.norm_for_param_grads[self.zero.get_param_id(p)] = part.float().norm(2)

    def wipe_gradients(self) -> None:
        """Zero the buffers that would step a parameter without a gradient by its last one."""
        zero = self.zero
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
        if zero.offload_optimizer if self.stage == 3 else zero.cpu_offload:
            for flat in self.flats:
                if flat.grad is not None and flat.grad.numel():
                    flat.grad.zero_()

    def discard_gradients(self, trained: Iterable[torch.Tensor]) -> None:
        """Everything that the engine holds of them, but for what `wipe_gradients` does."""
        zero = self.zero
        zero.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            table = getattr(zero, name, None)
            if isinstance(table, dict):
                table.clear()
        for p in trained:
            if hasattr(p, "grad_accum"):
                p.grad_accum = None
        if self.stage != 3:
            zero.micro_step_id = -1
        ds.forget_arrivals(zero)
        if hasattr(zero, "norm_for_param_grads"):
            zero.norm_for_param_grads = {}

    def forget_backward(self) -> None:
        """A backward was cut short: the engine is to wait for none of its gradients."""
        zero = self.zero
        ds.forget_backward(zero)
        for bucket in zero.ipg_buckets.values():
            if self.stage == 3:
                bucket.clear_params()
            else:
                bucket.clear()
        already = zero.params_already_reduced
        for key in already if isinstance(already, dict) else range(len(already)):
            already[key] = False


def stretch(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """What of a parameter of stage 3 this rank keeps. `attributes`: those that DeepSpeed has put on it."""
    size, numel = attributes["ds_tensor"].ds_numel, attributes["ds_numel"]
    start = min(size * attributes["ds_zero_partition_rank"], numel)
    return start, min(start + size, numel)


@dataclass(eq=False)
class SharePart(Piece):
    """A stretch of a whole: who keeps it says how it is reached."""

    shape: torch.Size
    dtype: torch.dtype
    stretch: tuple[int, int]
    reads: Callable[[], torch.Tensor]
    fills: Callable[[torch.Tensor], None]
    cut: object

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [self.stretch] if self.stretch[1] > self.stretch[0] else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self.reads().to(self.dtype)] if self.ranges() else []

    @torch.no_grad()
    def fill(self, full: torch.Tensor) -> None:
        self.fills(full.reshape(-1))
