"""The learning rate times the number of ranks, while an optimizer steps.

At all other times its groups hold the user's own number: schedulers count from it, the notebook shows it, and the next
cell does not multiply once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class ScaledRate:
    """Of the optimizers of one component. `on` and `off` around a cell."""

    def __init__(self, factor: int, optimizers: Callable[[], Collection[Optimizer]]) -> None:
        self.factor = factor
        self.optimizers = optimizers
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        """group, the user's own rate, what stands in its place"""
        self._handles: list[Any] = []

    def notes(self) -> list[str]:
        rates = {_shown(group["lr"]): None for o in self.optimizers() for group in o.param_groups if _scales(group)}
        return [f"learning rate {rate:g} × {self.factor} ranks = {rate * self.factor:g}" for rate in rates]

    def on(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def off(self) -> None:
        self._back()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._back()  # the step before may have raised
        if any(optimizer is one for one in self.optimizers()):
            for group in filter(_scales, optimizer.param_groups):
                own = group["lr"]
                group["lr"] = own * self.factor
                self._scaled.append((group, own, group["lr"]))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._back()

    def _back(self) -> None:
        for group, own, scaled in self._scaled:
            # An optimizer may have found another one by itself.
            group["lr"] = own if group["lr"] is scaled else group["lr"] / self.factor
        self._scaled.clear()


def _scales(group: dict[str, Any]) -> bool:
    return isinstance(group.get("lr"), float | int | torch.Tensor)


def _shown(rate: Any) -> float:
    return float(f"{float(rate):g}")
