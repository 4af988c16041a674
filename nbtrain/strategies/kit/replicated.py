"""A component that is whole on every rank, its gradients averaged: what ddp and its kin set up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from nbtrain.strategies.base import Component, Prepared
from nbtrain.strategies.kit.averaged import norms_of, replicas_of
from nbtrain.strategies.kit.gradient_average import GradSync
from nbtrain.strategies.kit.gradient_wire import Wire


class Replicated(Prepared):
    """`wire`: by what gradients travel."""

    hooks_see_own_gradients = averages_before_step = True

    def __init__(self, component: Component, bucket_mb: float, wire: Wire) -> None:
        super().__init__(component)
        norms = norms_of(component.modules.values())
        self.sync = GradSync(component.parameters(), bucket_mb, norms, wire=wire)

    def backward(self) -> AbstractContextManager[float]:
        self.sync.begin()
        return nullcontext(1.0)

    def differentiated(self, parameters: Iterable[torch.Tensor]) -> None:
        self.sync.differentiated(parameters)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> None:
        """Averaged gradients are what one process has, so torch's own clipping is right once all are averaged."""
        self.sync.catch_up(parameters)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        self.sync.catch_up(parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        return replicas_of(self.component)

    def reset(self) -> None:
        self.sync.reset()

    def close(self) -> None:
        self.sync.close()
