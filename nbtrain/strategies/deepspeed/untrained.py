"""Models without an optimizer, a teacher or one that is only evaluated: nothing to shard, kept whole on every rank.

Should the cell train one by hand, its gradients are averaged as under ddp."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from nbtrain.strategies.base import Component, Prepared
from nbtrain.strategies.kit.gradient_average import GradSync


class Untrained(Prepared):
    hooks_see_own_gradients = True

    def __init__(self, component: Component) -> None:
        super().__init__(component)
        self.sync = GradSync(component.parameters())

    def backward(self) -> AbstractContextManager[float]:
        self.sync.begin()
        return nullcontext(1.0)

    def differentiated(self, parameters: Iterable[torch.Tensor]) -> None:
        self.sync.differentiated(parameters)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> None:
        self.sync.catch_up(parameters)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        self.sync.catch_up(parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def reset(self) -> None:
        self.sync.reset()

    def close(self) -> None:
        self.sync.close()
