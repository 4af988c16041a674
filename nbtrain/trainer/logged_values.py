"""What `self.log` was given: drawn at once, and averaged over an epoch as one process would."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nbtrain.compat.dtensor import is_divided
from nbtrain.errors import UsageError

APART = 0.05
"""seconds between two points of a curve: a number that is drawn has to be waited for on a GPU"""

Sums = dict[str, tuple[str, torch.Tensor, float]]
"""name → (mean, sum, min or max; the sum; the weight) of one rank"""
Summed = Callable[[Sums], dict[str, tuple[str, torch.Tensor, float]]]
"""the same of all ranks"""


@dataclass(slots=True)
class _Sum:
    """Of one name, over the batches of an epoch."""

    how: str
    value: torch.Tensor
    weight: float

    def add(self, value: torch.Tensor, weight: float) -> None:
        if self.how in ("min", "max"):
            self.value = getattr(torch, f"{self.how}imum")(self.value, value)
        else:
            self.value = self.value + value * (weight if self.how == "mean" else 1)
            self.weight += weight


class LoggedValues:
    """Of one stage (training, validation, …), on one rank."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.sums: dict[str, _Sum] = {}
        self.metrics: dict[str, Any] = {}
        """objects of torchmetrics, computed when the epoch has ended"""
        self.by_loader: dict[str, int] = {}
        """name → number of the loader whose batches it is of"""
        self.plain: dict[str, str] = {}
        """name of a number of a step, or of an epoch, that was logged as both → the name that was given"""
        self.not_for_loggers: set[str] = set()
        """names that were logged with logger=False"""
        self._drawn = 0.0

    def add(
        self,
        name: str,
        value: Any,
        *,
        batch_size: int,
        on_step: bool,
        on_epoch: bool,
        reduce_fx: Any = "mean",
        loader: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Returns what is known at once, by the name that it has then."""
        how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        how = {"amin": "min", "amax": "max", "avg": "mean", "average": "mean"}.get(how, how)
        if how not in ("mean", "sum", "min", "max"):
            raise UsageError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): mean, sum, min and max are there")
        self.by_loader[name] = loader
        if on_step and on_epoch:
            self.plain |= {f"{name}_step": name, f"{name}_epoch": name}
        if hasattr(value, "compute") and hasattr(value, "update"):  # a metric of torchmetrics: it counts by itself
            self.metrics[name] = value
            return {}
        number = _number(name, value)
        if on_epoch:
            key = f"{name}_epoch" if on_step else name
            self.by_loader[key] = loader
            if key in self.sums:
                self.sums[key].add(number, batch_size)
            else:
                self.sums[key] = _Sum(how, number * (batch_size if how == "mean" else 1), batch_size)
        return {f"{name}_step" if on_epoch else name: number.float()} if on_step else {}

    def of_epoch(self, summed: Summed | None, is_over: bool) -> dict[str, torch.Tensor]:
        """What the epoch has come to, on every rank alike; the next one begins with nothing. `summed`: brings together
        the sums of ranks that have seen batches of their own."""
        mine = {name: (one.how, one.value, one.weight) for name, one in self.sums.items()}
        sums = mine if summed is None else summed(mine)
        found = {name: value / weight if how == "mean" else value for name, (how, value, weight) in sums.items()}
        for name, metric in self.metrics.items():
            found[name] = torch.as_tensor(metric.compute())
            if is_over:  # hooks at the end of an epoch may still ask it
                metric.reset()
        self.sums, self.metrics = {}, {} if is_over else self.metrics
        return {name: value.float() for name, value in found.items()}

    def is_time_to_draw(self) -> bool:
        now = time.perf_counter()
        if now - self._drawn < APART:
            return False
        self._drawn = now
        return True


def draw(values: dict[str, torch.Tensor]) -> None:
    """On the charts of the dashboard, and in `%distributed history`."""
    log = getattr(builtins, "log", None)
    if log is not None and values:
        runtime = log.__self__  # `log` itself would advise its own options
        runtime.log_values(runtime.steps.count, {name: float(value) for name, value in values.items()})


def _number(name: str, value: Any) -> torch.Tensor:
    found = value.detach() if isinstance(value, torch.Tensor) else None
    if found is not None and is_divided(found):  # a norm of what is in pieces is a number that all ranks know
        found = torch.tensor(float(found))
    if found is None and isinstance(value, int | float):
        found = torch.tensor(float(value))
    if found is None or found.numel() != 1:
        raise UsageError(
            f"self.log({name!r}, …) takes a number, a tensor with one element or a metric of torchmetrics, not "
            f"{type(value).__name__}"
        )
    return found.reshape(()).double()  # a sum over an epoch in 16 bits would stop growing
