"""Scales the learning rate with the number of batches in a step (`--scale-lr`), while an optimizer steps.

At all other times its groups hold the user's own rate: schedulers count from it, the notebook shows it, and the next
cell does not multiply once more. Without the option the arithmetic is said once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part

if TYPE_CHECKING:
    from nbtrain.worker.data.loaders import Loaders

RULES = {"linear": float, "sqrt": math.sqrt}
"""How a rate grows with the batch: with it, as plain SGD wants it, or with its square root, as Adam does."""


class ScaledRate(Part):
    """Scales the rates of optimizers while they step, and says what a larger batch asks for."""

    def __init__(self, steps: Steps, loaders: Loaders) -> None:
        self.steps, self.loaders = steps, loaders
        self.factor = 1.0
        self._stepping: Optimizer | None = None
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        """(group, the user's own rate, the scaled one)"""
        self._rates: list[float] = []
        """of the optimizers that have stepped in the cell"""

    def begin(self, cell: Cell) -> list[str]:
        self._rule, self._batches = cell.run.scale_lr, cell.batches
        self.factor = RULES[self._rule](cell.batches) if self._rule else 1.0
        return [] if cell.hands_off else notes(cell.optimizers, self._rule, cell.batches)

    def end(self, ok: bool) -> None:
        self._rates = rates(self.steps.taken) if self.steps.calls else []
        self.restore()
        self.factor = 1.0

    def advice(self, names: Mapping[str, object], stepped: bool) -> dict[str, str]:
        shared = self.loaders.gave_shares and stepped and not self._rule
        return {"learning rate": advice(self._rates, self._batches)} if shared else {}

    def before_step(self, optimizer: Optimizer) -> None:
        """A step within another optimizer's step scales nothing: a strategy may step for the user's optimizer."""
        if self._stepping is not None and self._stepping is not optimizer:
            return
        self.restore()
        self._stepping = optimizer
        for group in filter(_scales, optimizer.param_groups):
            own = group["lr"]
            group["lr"] = own * self.factor
            self._scaled.append((group, own, group["lr"]))

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._stepping:
            self.restore()

    def restore(self) -> None:
        """Put the user's rates back, also after a step that raised."""
        self._stepping = None
        for group, own, scaled in self._scaled:
            # The optimizer itself may have changed the rate.
            group["lr"] = own if group["lr"] is scaled else group["lr"] / self.factor
        self._scaled.clear()


def notes(optimizers: Iterable[Optimizer], rule: str, batches: int) -> list[str]:
    """Sentences for the first line of a cell."""
    if not rule:
        return []
    if batches == 1:
        return ["learning rate × 1: a step's batch is one process's"]
    times = f"× {batches}" if rule == "linear" else f"× √{batches}"
    return [f"learning rate {rate:g} {times} = {rate * RULES[rule](batches):.4g}" for rate in rates(optimizers)]


def advice(rates: Sequence[float], batches: int) -> str:
    """The sentence about both rules; empty where nothing is to be scaled."""
    if batches == 1 or not rates:
        return ""
    linear, root = (f"{rates[0] * rule(batches):.3g}" for rule in RULES.values())
    return (
        f"each step now uses {batches} batches. If you chose learning rate {rates[0]:g} for one process, consider "
        f"{linear} (linear rule, SGD) or {root} (square-root rule, Adam): --scale-lr linear or sqrt"
    )


def rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """The user's own initial learning rates, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if _scales(group)]
    rates_there = (float(group.get("initial_lr", group["lr"])) for group in groups)
    return list(dict.fromkeys(float(f"{rate:g}") for rate in rates_there))


def _scales(group: dict[str, Any]) -> bool:
    return isinstance(group.get("lr"), float | int | torch.Tensor)
