"""How gradients travel: what a flat tensor's average over all ranks is computed in, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from nbtrain.compat.tensors import flatten
from nbtrain.errors import UsageError

Dtype = Literal["none", "bf16", "fp16", "fp32"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HALVES = torch.bfloat16, torch.float16

LARGE = 8192
"""Numbers in a tensor from which on dividing it while it is copied is worth a call of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketedAllReduce:
    """Flags of a strategy that sends gradients in buckets."""

    bucket_mb: float = 25
    """gradients are sent in buckets of this many megabytes"""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise UsageError(f"--bucket-mb {self.bucket_mb}: a bucket needs a size; 25 is usual")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending(BucketedAllReduce):
    """And of one that sends them by `AllReduce`."""

    comm_dtype: Dtype = "none"
    """gradients are reduced in this; weights and gradients stay what they are"""


class AllReduce:
    """torch.distributed's own. Complex tensors travel as they are."""

    def __init__(self, comm_dtype: Dtype = "none") -> None:
        self.dtype = DTYPES.get(comm_dtype)

    def average(self, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Begins, for tensors of one dtype; what is returned waits for the end, and gives them in one."""
        own = dtype = tensors[0].dtype
        if self.dtype is not None and own.is_floating_point:
            dtype = self.dtype
        elif own in HALVES and dist.get_backend() == "gloo":
            dtype = torch.float32  # sums of halves lose digits, and on a CPU nothing is won by them
        sent = share(tensors, dtype)
        work = dist.all_reduce(sent, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return sent.to(own)

        return wait

    def forget(self) -> None:
        """What was begun and not waited for yet: the backward was cut short. Not collective."""


def share(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What this rank adds to the average: all in one, divided already, for sums of halves would overflow."""
    count = dist.get_world_size()
    sizes = [one.numel() for one in tensors]
    if tensors[0].dtype is not dtype or sum(sizes) < LARGE * len(sizes):
        return flatten(tensors).to(dtype).div_(count)
    flat = tensors[0].new_empty(sum(sizes))
    for one, part in zip(tensors, flat.split(sizes), strict=True):
        torch.div(one.reshape(-1), count, out=part)
    return flat
