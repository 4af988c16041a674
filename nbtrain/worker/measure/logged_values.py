"""`log(loss=loss)` in a cell: numbers for the run's chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nbtrain.base.errors import UsageError
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part


class LoggedValues(Part):
    """What a cell logs on this rank."""

    def __init__(
        self, steps: Steps, send: Callable[[int, Mapping[str, float]], None], reduce: Callable[..., Any]
    ) -> None:
        """`send` takes a step and what was logged in it."""
        self.steps, self.send, self.reduce = steps, send, reduce
        self._differs = False
        """a step uses several batches, of several ranks"""
        self._apart = ""
        """the first name that was logged without `sync`"""
        self._again: LoggedAgain | None = None
        """how often names were logged; None: nothing was"""

    def begin(self, cell: Cell) -> None:
        self._differs = cell.several and cell.batches > 1 and not cell.hands_off
        self._apart, self._again = "", None

    def advice(self, names: Mapping[str, object], stepped: bool) -> dict[str, str]:
        again = {} if self._again is None else self._again.advice(stepped)
        if not (self._apart and self._differs):
            return again
        alone, mean = f"log({self._apart}=…)", f"log({self._apart}=…, sync=True)"
        return {**again, "log": f"{alone} records one value per rank; {mean} records their mean"}

    def log(self, *unnamed: Any, sync: bool = False, **values: Any) -> None:
        """Show numbers on the run's chart: `log(loss=loss)`.

        They are each rank's own, of its own batch. `log(loss=loss, sync=True)`: the mean over the ranks; all of them
        have to call it.
        """
        if unnamed:
            raise UsageError("log() takes numbers by their names: log(loss=loss)")
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except OverflowError:  # a whole number beyond all floats
                numbers[name] = math.inf if value > 0 else -math.inf
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"log({name}=...) takes a number or a tensor with one element, not {type(value).__name__}"
                ) from None
        if sync:
            mean = self.reduce(torch.tensor(list(numbers.values()), dtype=torch.float64))
            numbers = dict(zip(numbers, mean.tolist(), strict=True))
        self._apart = self._apart or (next(iter(numbers), "") if not sync else "")
        if self._again is None:
            self._again = LoggedAgain()
        self._again.note(self.steps.count, numbers)
        self.send(self.steps.count, numbers)


class LoggedAgain:
    """Counts how often each name is logged in a step, as in a loop that validates: a chart has one value for it."""

    def __init__(self) -> None:
        self._step = -1
        self._now: dict[str, int] = {}
        self._name, self._most = "", 1
        """the name that was logged most often in a step"""

    def note(self, step: int, names: Iterable[str]) -> None:
        if step != self._step:
            self._step, self._now = step, dict.fromkeys(names, 1)
            return
        for name in names:
            count = self._now[name] = self._now.get(name, 0) + 1
            if count > self._most:
                self._name, self._most = name, count

    def advice(self, stepped: bool) -> dict[str, str]:
        """`stepped`: an optimizer has taken a step in this cell."""
        if not self._name:
            return {}
        if stepped:
            return {"log again": (
                f"{self._name} was logged {self._most:,} times in one step; the dashboard names the last of these "
                "values. To show their mean, log it once"
            )}  # fmt: skip
        return {"log without a step": (
            f"{self._name} was logged {self._most:,} times and no optimizer took a step; charts are over steps, so the "
            "dashboard names the last of these values. nbtrain.history()[-1].metrics has them one by one"
        )}  # fmt: skip
