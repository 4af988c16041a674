"""`ddp`: every rank holds the whole model and sees a share of the batches; gradients are averaged.

The model is not wrapped: `type(model)`, attributes, methods and state-dict keys are the user's own.
BatchNorm normalises by a rank's own share of the batch, as it does everywhere; its running statistics are averaged
with the gradients, so that all ranks evaluate one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.kit.gradient_buckets import AllReduce, AllReduceOptions
from nbtrain.strategies.kit.replicated import Replicated

if TYPE_CHECKING:
    from nbtrain.strategies.memory_estimate import Estimate, Profile, World


class DDP(Strategy):
    """Data parallel training of whole models."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options(AllReduceOptions):
        """How gradients travel."""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        from nbtrain.strategies.kit.profile_arithmetic import replicated, width_sent

        return replicated(profile, world, self.options.bucket_mb, width_sent(self.options.comm_dtype, world))

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to average with
            return Prepared(component)
        return Replicated(component, self.options.bucket_mb, AllReduce(self.options.comm_dtype))
