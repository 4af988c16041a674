"""The tables of DeepSpeed's optimizers, in one form for all stages: where numbers of parameters and gradients lie.

DeepSpeed has no functions to multiply the gradients that it holds, to take their norm before the step, to throw them
away, or to forget a backward that was cut short. They are here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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


class EngineLayout:
    """Of one engine's optimizer, `zero`."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.zero = engine.optimizer
        self.stage = stage
        self.cut = object()
        self.shares: dict[int, Share] = dict(self._shares_stage_3() if stage == 3 else self._shares_stages_1_2())
        """by id of the parameter"""

    # --- parameters --------------------------------------------------------------------

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
        filled: Callable[[torch.Tensor], None] = lambda whole: None,
    ) -> SharePart:
        """`flat`: gives the flat piece in which the share lies. `filled`: called after the share was taken out of a
        whole."""

        def stretch() -> torch.Tensor:
            return flat().narrow(0, share.at, share.stop - share.start)

        def read() -> torch.Tensor:
            with self.at_hand(share.flat, write=False):
                return stretch().clone() if self.swapped(share.flat) else stretch()

        def fill(whole: torch.Tensor) -> None:
            with self.at_hand(share.flat):
                stretch().copy_(whole[share.start : share.stop])
            filled(whole)

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

    # --- gradients ---------------------------------------------------------------------

    @torch.no_grad()
    def multiply_gradients(self, trained: Iterable[torch.Tensor], local: Iterable[torch.Tensor], factor: float) -> None:
        """`local`: stage 1's, of this rank, where stand-ins are in their place."""
        zero = self.zero
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.mul_(factor)
            return
        found = [getattr(p, "grad_accum", None) for p in trained]
        found += [*local, *getattr(zero, "accumulated_grads_in_cpu", {}).values()]
        for table in (zero.all_grad_tensors, zero.averaged_gradients):
            found += [grad for grads in table.values() for grad in grads or ()]
        for grad in {id(grad): grad for grad in found if grad is not None}.values():
            grad.mul_(factor)

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

    def norm_of_reduced(self, device: torch.device, arrived: Container[int]) -> torch.Tensor:
        """Stages 2 and 3, where backwards have reduced gradients: each rank squares what it keeps of them. `arrived`:
        whose, by id. Collective."""
        pieces = [self.zero.grad_partitions_flat_buffer] if self.stage == 3 else self._reduced(arrived)
        square = torch.zeros((), device=device)
        for piece in pieces:
            square += torch.linalg.vector_norm(piece.detach(), dtype=torch.float32).to(device) ** 2
        dist.all_reduce(square)
        return square.sqrt()

    def _reduced(self, arrived: Container[int]) -> Iterator[torch.Tensor]:
        """Stage 2: this rank's share of each gradient."""
        zero = self.zero
        for number, members in enumerate(zero.params_in_partition):
            if ds.is_in_one_piece(zero, number):
                if (group := zero.averaged_gradients.get(number)) is not None:
                    yield group.flat_partition
                continue
            for at, p in enumerate(members):
                share = self.shares[id(p)]
                if zero.cpu_offload:
                    if id(p) not in arrived:  # what is there is of an earlier step
                        continue
                    flat = zero.accumulated_grads_in_cpu[zero.get_param_id(p)].view(-1)
                else:
                    held = zero.all_grad_tensors.get(number)
                    if held is None:
                        continue
                    flat = held[at].reshape(-1)
                yield flat if flat.numel() < p.numel() else flat[share.start : share.stop]

    def norm_of_own(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Stage 1, where each rank still has gradients of its own: the norm of their mean, which is taken of a copy, a
        bucketful at once. Collective."""
        square: Any = 0.0
        for batch in _batches(gradients, int(self.zero.reduce_bucket_size)):
            flat = torch.cat([g.detach().reshape(-1).float() for g in batch])
            dist.all_reduce(flat)
            square = square + torch.linalg.vector_norm(flat / dist.get_world_size()) ** 2
        return torch.as_tensor(square).sqrt()


def _batches(tensors: Iterable[torch.Tensor], at_once: int) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    for tensor in tensors:
        if batch and sum(one.numel() for one in batch) + tensor.numel() > at_once:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


def stretch(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """What of a parameter of stage 3 this rank keeps. `attributes`: those that DeepSpeed has put on it."""
    size, numel = attributes["ds_tensor"].ds_numel, attributes["ds_numel"]
    start = min(size * attributes["ds_zero_partition_rank"], numel)
    return start, min(start + size, numel)


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
