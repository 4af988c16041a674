"""Components that are whole on every rank, and whose gradients are averaged: what ddp and its kin set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from nbtrain.compat import modules
from nbtrain.compat.layers import NormLayer
from nbtrain.strategies.base import Component, Prepared, Promises, is_lazy
from nbtrain.strategies.kit.collective_calls import subject_of
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.gradient_buckets import AllReduce
from nbtrain.strategies.kit.running_statistics import norms_of


def replicas_of(
    component: Component, chosen: Callable[[torch.Tensor], bool] = lambda tensor: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what should be equal on every rank when a cell has ended. `chosen`: what the rank has whole.
    Running statistics are not, while their layer trains: it may have seen a batch after the last backward."""
    for where, module in component.modules.items():
        for path, part in modules.named_parts(module):
            at = f"{where}.{path}" if path else where
            for name, parameter in modules.parameters(part).items():
                if parameter is not None and chosen(parameter) and not is_lazy(parameter):
                    yield f"{at}.{name}", parameter
            for name, buffer in modules.buffers(part).items():
                if buffer is None or is_lazy(buffer) or not chosen(buffer):
                    continue
                if not (isinstance(part, NormLayer) and part.training and name.startswith("running_")):
                    yield f"{at}.{name}", buffer
    yield from component.loose.items()


class Averaged(Prepared):
    """A component whose gradients `sync` averages."""

    promises = Promises(keeps_graphs=True, any_optimizer=True, steps_alone=True)

    def __init__(self, component: Component, sync: GradientAverage) -> None:
        super().__init__(component)
        self.sync = sync
        sync.subject = subject_of(next(iter((*component.modules, *component.loose)), ""))

    def backward(self, sync: bool = True) -> AbstractContextManager[float]:
        return self.sync.backward(sync)

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self.sync.catch_up(parameters)

    def leave(self, pause: bool = False) -> None:
        if self.sync.armed:  # cut short
            self.sync.reset()
        if self.sync.graphs and not pause:  # else the cell may hold some that `p.grad` is no part of
            self.sync.graphs = any(p.grad is not None and p.grad.requires_grad for p in self.sync.parameters)

    def close(self, whole: bool = True) -> None:
        self.sync.close()


class Replicated(Averaged):
    """A component that is whole on every rank. `all_reduce`: what averages gradients."""

    promises = replace(Averaged.promises, averages_before_step=True)

    def __init__(self, component: Component, bucket_mb: float, all_reduce: AllReduce) -> None:
        norms = norms_of(component.modules.values())
        super().__init__(component, GradientAverage(component.parameters(), bucket_mb, norms, all_reduce=all_reduce))

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        return replicas_of(self.component)
