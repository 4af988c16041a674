"""Averages gradients by Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.strategies.horovod.session import HorovodSession
from nbtrain.strategies.kit.gradient_buckets import HALVES, AllReduce, summand


class HorovodAllReduce(AllReduce):
    """Averages by Horovod. Before the first wait all ranks meet in a reduction of torch's, of one number. It is watched
    as every other is, so that no rank waits in Horovod for one that will not come; after it all have sent theirs."""

    def __init__(self, session: HorovodSession, name: str, half: bool) -> None:
        """`name`: of this all-reduce alone, and the same on all ranks."""
        super().__init__()
        self.session = session
        self.name = name
        self.half = half
        self.out = self.back = 0
        """how many were begun, and how many waited for, since none was under way"""
        self.met = True

    def average(self, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        hvd = self.session.start()
        own = tensors[0].dtype
        if own.is_complex:
            tensors = [torch.view_as_real(tensor) for tensor in tensors]
        compression = hvd.Compression.fp16 if self.half else hvd.Compression.none
        dtype = tensors[0].dtype
        if not self.half and dtype in HALVES:
            dtype = torch.float32  # Horovod knows no bfloat16, and sums of halves lose digits
        sent, context = compression.compress(_near(summand(tensors, dtype), hvd))
        handle: int | RuntimeError
        try:
            handle = hvd.allreduce_async_(sent, name=f"nbtrain.{self.name}.{self.out}", op=hvd.Sum)
        except RuntimeError as error:  # another rank has shut it down: the same backward may be failing here, too
            handle = error
        self.out += 1
        self.met = False

        def wait() -> torch.Tensor:
            self.meet()
            if isinstance(handle, RuntimeError):
                raise handle
            mean: torch.Tensor = compression.decompress(hvd.synchronize(handle), context)
            self.back += 1
            if self.back == self.out:
                self.out = self.back = 0
            if own.is_complex:
                mean = torch.view_as_complex(mean.view(-1, 2))
            return mean.to(device=tensors[0].device, dtype=own)

        return wait

    def meet(self) -> None:
        if not self.met:
            self.met = True
            dist.all_reduce(torch.zeros(1))

    def forget(self) -> None:
        if self.out:  # the others may have sent more, or less: nothing of it is to be waited for
            self.out = self.back = 0
            self.met = True
            self.session.stop()


def _near(tensor: torch.Tensor, hvd: Any) -> torch.Tensor:
    """Where Horovod can reduce it: one that was built without CUDA knows no tensors on a card."""
    return tensor.cpu() if tensor.is_cuda and not hvd.cuda_built() else tensor
