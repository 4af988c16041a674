"""Turns a run's events into rows of numbers, and sums them up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.events import PHASES, Event, Failed, Finished, Memory, Metrics, Phases, Throughput, Use
from nbtrain.watch.feed.series import Series
from nbtrain.watch.runs.thinning import Row

FORMAT = 1
"""of a file"""
METRICS = "metrics"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    METRICS: ("step", "value"),
    "throughput": ("seconds", "steps", "samples", "running", "operations", "fastest"),
    "memory": ("seconds", "process", "allocated", "reserved", "peak", "limit", "retries"),
    "phases": ("seconds", "steps", *PHASES),
    "use": ("seconds", "processor", "card"),
}
"""`seconds`: since the run began. `running`: since the rank's cell began"""
JUDGED: Mapping[str, tuple[int, ...]] = {
    METRICS: (1,), "throughput": (1,), "memory": (1, 2, 3), "phases": (1,), "use": (1, 2),
}  # fmt: skip
"""Columns whose lowest and highest values are kept when rows are thinned out. Totals only grow."""
SHOWN = 24
"""metrics whose last value is kept besides the rows, at most"""
TOGETHER = 4
"""values of each rank among which a step is looked for that all ranks have"""


def rows(event: Event, began: float) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """(kind, name, rows)"""
    if isinstance(event, Metrics):
        for name, points in event.points.items():
            yield METRICS, str(name), points
    elif (row := _row(event, round(max(0.0, event.time - began), 3))) is not None:
        yield row[0], "", [row[1]]


def _row(event: Event, seconds: float) -> tuple[str, Row] | None:
    if isinstance(event, Throughput):
        running = round(event.seconds, 3)
        return "throughput", (seconds, event.steps, event.samples, running, event.operations, event.fastest)
    if isinstance(event, Memory):
        return "memory", (
            seconds, event.process, event.allocated, event.reserved, event.peak, event.limit, event.retries
        )  # fmt: skip
    if isinstance(event, Phases):
        return "phases", (seconds, event.steps, *(round(spent, 6) for spent in event.seconds))
    if isinstance(event, Use):
        return "use", (seconds, round(event.processor, 3), None if event.card is None else round(event.card, 3))
    return None


@dataclass(slots=True)
class Totals:
    """The totals of a run."""

    steps: int = 0
    logged: int = 0
    """values that were given to log()"""
    peak: int = 0
    """bytes, of the rank that used most"""
    last: dict[str, dict[int, list[Row]]] = field(default_factory=dict)
    """metric → rank → the last of its (step, value)"""
    speed: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """rank → steps, samples, seconds"""

    def finished(self, event: Finished | Failed) -> None:
        """Note the steps; short cells send no other event with them."""
        self.steps = max(self.steps, event.steps)

    def add(self, kind: str, rank: int, name: str, rows: Sequence[Row]) -> None:
        """`rows`: of one kind and name, one at least."""
        if kind == METRICS:
            self.logged += len(rows)
            self.steps = max(self.steps, max(int(step or 0) for step, _ in rows))
            if name in self.last or len(self.last) < SHOWN:
                ranks = self.last.setdefault(name, {})
                ranks[rank] = [*ranks.get(rank, ()), *rows[-TOGETHER:]][-TOGETHER:]
        elif kind == "throughput":
            _, steps, samples, running = (number or 0 for number in rows[-1][:4])
            self.steps = max(self.steps, int(steps))
            self.speed[rank] = (steps, samples, running)
        elif kind == "memory":
            for row in rows:  # where torch holds nothing on a device, the process is what counts
                _, process, _, reserved, peak = (number or 0 for number in row[:5])
                self.peak = max(self.peak, int(peak), int(reserved or process))

    def figures(self) -> dict[str, Any]:
        """The totals as they are written in the file's last line."""
        speeds = [(steps / t, samples / t) for steps, samples, t in self.speed.values() if t > 0]
        return {
            "steps": self.steps,
            "samples": round(sum(samples for _, samples, _ in self.speed.values())),
            "steps_per_second": max((steps for steps, _ in speeds), default=None),
            "samples_per_second": sum(samples for _, samples in speeds) if speeds else None,
            "peak_memory": self.peak or None,
            "logged": self.logged,
            "last": {name: _latest(ranks) for name, ranks in self.last.items()},
        }


def _latest(ranks: Mapping[int, Sequence[Row]]) -> float:
    from nbtrain.watch.feed.across_ranks import latest  # most runs log something, and none in its first steps

    return latest({rank: _curve(points) for rank, points in ranks.items()}).value


def _curve(points: Sequence[Row]) -> Series:
    made = Series()
    made.extend([(step or 0, math.nan if y is None else float(y)) for step, y in points])
    return made
