"""Gradients travel in buckets: parameters that travel together, their flat tensor, and what averages it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from nbtrain.base.errors import UsageError
from nbtrain.compat.tensors import flatten
from nbtrain.strategies.base import Strategy

T = TypeVar("T")


Dtype = Literal["none", "bf16", "fp16", "fp32"]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


HALVES = torch.bfloat16, torch.float16


FIRST = 2**20
"""bytes of the first bucket, as in torch's DistributedDataParallel"""


LARGE = 8192
"""from this many numbers a tensor is divided while it is copied, in a call of its own"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketOptions(Strategy.Options):
    """Flags of a strategy that sends gradients in buckets."""

    bucket_mb: float = 25
    """gradients are sent in buckets of this many megabytes"""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise UsageError(f"--bucket-mb {self.bucket_mb}: a bucket needs a size; 25 is usual")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceOptions(BucketOptions):
    """Flags of a strategy that sends gradients by `AllReduce`."""

    comm_dtype: Dtype = "none"
    """gradients are reduced in this; weights and gradients stay what they are"""


class AllReduce:
    """Averages flat tensors by torch.distributed's all-reduce. Complex ones travel as they are."""

    def __init__(self, comm_dtype: Dtype = "none") -> None:
        self.dtype = DTYPES.get(comm_dtype)

    def average(self, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Begin to average tensors of one dtype. What is returned waits, and gives them in one flat tensor."""
        own = dtype = tensors[0].dtype
        if self.dtype is not None and own.is_floating_point:
            dtype = self.dtype
        elif own in HALVES and dist.get_backend() == "gloo":
            dtype = torch.float32  # sums of halves lose digits, and on a CPU nothing is won by them
        sent = summand(tensors, dtype)
        work = dist.all_reduce(sent, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return sent.to(own)

        return wait

    def forget(self) -> None:
        """The backward was cut short: forget what was begun and not waited for yet. Not collective."""


def summand(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What this rank adds to the average: one flat tensor, divided already, for sums of halves would overflow."""
    count = dist.get_world_size()
    sizes = [tensor.numel() for tensor in tensors]
    if tensors[0].dtype is not dtype or sum(sizes) < LARGE * len(sizes):
        return flatten(tensors).to(dtype).div_(count)
    flat = tensors[0].new_empty(sum(sizes))
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        torch.div(tensor.reshape(-1), count, out=part)
    return flat


def in_buckets(items: Sequence[T], capacity: int, size: Callable[[T], int], kind: Callable[[T], Any]) -> list[list[T]]:
    """Items of one kind that follow one another, up to `capacity` bytes of them, the last first: that is about the
    order in which gradients arrive. The first is full when it has `FIRST` bytes, and travels while others fill."""
    groups: list[list[T]] = []
    room = 0
    for item in reversed(items):
        needed = 1 if len(groups) == 1 and capacity > FIRST else size(item)
        if not groups or room < needed or kind(groups[-1][0]) != kind(item):
            room = capacity if groups else min(FIRST, capacity)
            groups.append([])
        groups[-1].append(item)
        room -= size(item)
    return groups


class Bucket:
    """Parameters whose gradients travel together: one dtype, one device."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.keys = list(map(id, parameters))
        self.ids = frozenset(self.keys)
        # A flat buffer gives contiguous views; where the parameter is laid out otherwise its gradient should be too.
        self.contiguous = all(p.is_contiguous() for p in parameters)
        # Per parameter: used, and then: sparse. Made once for the usual case: on a GPU this is a transfer.
        self.all_used = parameters[0].new_tensor([1.0] * len(parameters) + [0.0] * len(parameters))
        self.shapes = [*parameters, self.all_used]
