"""How far a rank is in its loader and in all epochs, and how long that will take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from nbtrain.base.events import VALIDATION, Progress

WINDOW = 5.0
"""seconds over which rates are measured"""


class Rate:
    """How fast a total grows over the last few seconds; None while that is not known."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, float]] = deque()

    def add(self, seconds: float, total: float) -> None:
        totals = self._totals
        if totals and (seconds < totals[-1][0] or total < totals[-1][1]):
            totals.clear()  # a new epoch, a new count
        totals.append((seconds, total))
        while len(totals) > 2 and totals[1][0] <= seconds - WINDOW:
            totals.popleft()

    @property
    def value(self) -> float | None:
        if len(self._totals) < 2:
            return None
        (began, before), (now, total) = self._totals[0], self._totals[-1]
        return (total - before) / (now - began) if now > began else None


@dataclass(kw_only=True, slots=True)
class TrainingProgress:
    """Of one rank; of a training that evaluates in between, too."""

    last: Progress | None = None
    rate: Rate = field(default_factory=Rate)
    """batches of the loader under way"""
    _trained: Progress | None = None
    """the last word that was not of an evaluation"""
    _first: Progress | None = None
    _epoch: Progress | None = None
    """of the first epoch, and of this one, the first word"""

    def receive(self, event: Progress) -> None:
        trained = self._trained
        if not event.stage:
            if trained is None or event.epoch != trained.epoch:
                self._epoch = event
                self._first = self._first or event
            self._trained = event
        elif event.stage == VALIDATION and event.epochs is None and trained is not None:
            event = replace(event, epoch=trained.epoch, epochs=trained.epochs)  # it counts its own iterations
        if self.last is not None and (event.epoch, event.stage) != (self.last.epoch, self.last.stage):
            self.rate = Rate()
        self.last = event
        self.rate.add(event.time, event.done)

    @property
    def trained(self) -> float | None:
        """While a training evaluates: its share of all epochs, where it is known how many there will be."""
        if self.last is None or self.last.stage != VALIDATION or self._trained is None:
            return None
        return _of_all(self._trained)

    @property
    def share(self) -> float | None:
        """What is done of all epochs, where it is known how many there will be; else of the loader."""
        if self.last is None or not self.last.total:
            return self.trained
        of_all = None if self.last.stage else _of_all(self.last)
        return next((share for share in (self.trained, of_all) if share is not None), self.last.done / self.last.total)

    @property
    def left(self) -> float | None:
        """Seconds to the end of all epochs, where it is known how many there will be; else to that of the loader."""
        progress, rate = self.last, self.rate.value
        if progress is None:
            return None
        training = not progress.stage or self.trained is not None
        if training and progress.epochs is not None and self._first is not None and self._epoch is not None:
            over, began = self._epoch.epoch - self._first.epoch, self._epoch.time
            if over > 0:  # by the pace of those that are over, with all that is in them
                each = (began - self._first.time) / over
                return max(0.0, each * (progress.epochs - progress.epoch) - (progress.time - began))
        if progress.total is None or not rate or self.trained is not None:
            return None
        epochs = 0 if progress.epochs is None or progress.stage else progress.epochs - progress.epoch - 1
        return max(0.0, progress.total - progress.done + epochs * progress.total) / rate


def _of_all(progress: Progress) -> float | None:
    if progress.epochs is None or not progress.total:
        return None
    return (progress.epoch + progress.done / progress.total) / progress.epochs
