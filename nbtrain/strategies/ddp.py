"""`ddp`: every rank holds the whole model and sees a share of the batches; gradients are averaged.

The model is not wrapped: `type(model)`, attributes, methods and state-dict keys are the user's own.
BatchNorm normalises by a rank's own share of the batch, as it does everywhere; its running statistics are averaged
with the gradients, so that all ranks evaluate one model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from nbtrain.errors import UsageError
from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.replicated import Replicated
from nbtrain.strategies.wire import Dtype, Wire


class DDP(Strategy):
    """Data parallel training of whole models."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        bucket_mb: float = 25
        """gradients are sent in buckets of this many megabytes"""
        comm_dtype: Dtype = "none"
        """gradients are reduced in this; weights and gradients stay what they are"""

        def __post_init__(self) -> None:
            if not self.bucket_mb > 0:
                raise UsageError(f"--bucket-mb {self.bucket_mb}: a bucket needs a size; 25 is usual")

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to average with
            return Prepared(component)
        return Replicated(component, self.options.bucket_mb, Wire(self.options.comm_dtype))
