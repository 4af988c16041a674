"""`ddp`: every rank holds the whole model and sees a share of the batches; gradients are averaged.

The model is not wrapped: `type(model)`, attributes, methods and state-dict keys are the user's own.
BatchNorm normalises by a rank's own share of the batch, as it does everywhere; its running statistics are averaged
with the gradients, so that all ranks evaluate one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nbtrain.errors import UsageError
from nbtrain.strategies.base import Component, Prepared, Strategy, is_lazy
from nbtrain.strategies.gradsync import GradSync


class Replicated(Prepared):
    """A component that exists once on every rank."""

    def __init__(self, component: Component, bucket_mb: float) -> None:
        super().__init__(component)
        norms = {
            id(part): part
            for module in component.modules.values()
            for part in module.modules()
            if isinstance(part, _NormBase) and not isinstance(part, nn.SyncBatchNorm)
        }
        self.sync = GradSync(component.parameters(), bucket_mb, norms.values())

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> None:
        """Averaged gradients are what one process has, so torch's own clipping is right once all are averaged."""
        self.sync.catch_up(parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        for where, module in self.component.modules.items():
            for path, part in module.named_modules():
                at = f"{where}.{path}" if path else where
                for name, parameter in part.named_parameters(recurse=False):
                    if not is_lazy(parameter):
                        yield f"{at}.{name}", parameter
                for name, buffer in part.named_buffers(recurse=False):
                    if not is_lazy(buffer) and not (isinstance(part, _NormBase) and name.startswith("running_")):
                        yield f"{at}.{name}", buffer
        yield from self.component.loose.items()

    def reset(self) -> None:
        self.sync.reset()

    def close(self) -> None:
        self.sync.close()


class DDP(Strategy):
    """Data parallel training of whole models."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        bucket_mb: float = 25
        """gradients are sent in buckets of this many megabytes"""

        def __post_init__(self) -> None:
            if not self.bucket_mb > 0:
                raise UsageError(f"--bucket-mb {self.bucket_mb}: a bucket needs a size; 25 is usual")

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to average with
            return Prepared(component)
        return Replicated(component, self.options.bucket_mb)
