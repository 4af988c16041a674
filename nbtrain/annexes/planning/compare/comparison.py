"""What was measured when a training loop ran a few steps under several strategies: plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from statistics import stdev
from typing import Any

from nbtrain.annexes.planning.compare import comparison_table

STATES = ("waiting", "running", "done", "failed")
STUDENT = (inf, inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""95 % of a mean of so many trials is within so many standard errors (Student's t)"""
ALONE = 0.2
"""a pace of one trial may be off by this share"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWay:
    """One row: the loop under one strategy and size, and what was measured."""

    name: str
    """`fsdp`"""
    line: str
    """the options of this row, as they are typed: `--strategy fsdp --devices 4`"""
    state: str = "waiting"
    """one of STATES"""
    ranks: int = 0
    memory: tuple[int, ...] = ()
    """peak bytes of each rank"""
    steps: int = 0
    """timed steps"""
    step: float = 0.0
    """seconds per step: the median, of the slowest rank"""
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    """of all ranks together; 0: no loader said how many samples a batch has"""
    paces: tuple[float, ...] = ()
    """of each trial, where there were several: its samples per second, or its steps where samples are not known"""
    batch: int = 0
    """samples per step and rank; 0: not known"""
    size: float | None = None
    """the batch size, or the value of the size parameter, where the largest is searched"""
    why: str = ""
    """why it failed, in a sentence"""
    no_memory: bool = False
    """it failed because it ran out of memory"""

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def pace(self) -> float:
        """What rows are compared by: samples per second, or steps where samples are not known."""
        return self.samples_per_second or self.steps_per_second

    @property
    def spread(self) -> float | None:
        """Half the 95 % interval of the pace; None: one trial says nothing of it."""
        count = len(self.paces)
        if count < 2 or not all(map(isfinite, self.paces)):
            return None
        return STUDENT[min(count, len(STUDENT) - 1)] * stdev(self.paces) / sqrt(count)

    def reaches(self, other: MeasuredWay) -> bool:
        """Whether this row may be as fast as the other: their intervals overlap."""
        mine, theirs = (ALONE * row.pace if row.spread is None else row.spread for row in (self, other))
        return self.pace + mine >= other.pace - theirs


GOALS = ("speed", "batch", "model", "growth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows, in the order in which they were asked for."""

    rows: tuple[MeasuredWay, ...]
    steps: int
    goal: str = "speed"
    """one of GOALS: the fastest, the largest batch, the largest model; with growth no row is the best"""
    parameter: str = ""
    """the name whose value is changed, where the goal is the largest model"""
    seconds: float = 0.0
    """duration of the whole comparison"""
    over: bool = False

    @property
    def contenders(self) -> tuple[MeasuredWay, ...]:
        """Rows of which any may be the best, once it is over: of the largest size the fastest, and those whose interval
        reaches its. Empty: none worked, or nobody asks for the best."""
        if self.goal == "growth" or not self.over:
            return ()
        done = [row for row in self.rows if row.state == "done"]
        largest = max((row.size or 0 for row in done), default=0)
        largest_rows = [row for row in done if (row.size or 0) == largest]
        first = max(largest_rows, key=lambda row: row.pace, default=None)
        return tuple(row for row in largest_rows if row is first or (first is not None and row.reaches(first)))

    @property
    def best(self) -> MeasuredWay | None:
        """The row that is clearly the best. None: it is too close to call."""
        contenders = self.contenders
        return contenders[0] if len(contenders) == 1 else None

    def with_row(self, at: int, **changes: Any) -> Comparison:
        rows = list(self.rows)
        rows[at] = replace(rows[at], **changes)
        return replace(self, rows=tuple(rows))

    @staticmethod
    def of(names: Iterable[tuple[str, str]], **what: Any) -> Comparison:
        """A comparison of which nothing is measured yet. `names`: name and line of each row."""
        return Comparison(rows=tuple(MeasuredWay(name=name, line=line) for name, line in names), **what)

    def data(self) -> dict[str, Any]:
        """What the picker shows of it."""
        best = self.best
        return {
            "title": comparison_table.title(self),
            "table": comparison_table.table(self),
            "rows": [{"line": row.line, "state": row.state, "best": row is best} for row in self.rows],
            "use": comparison_table.use(self),
            "picture": comparison_table.picture(self),
        }

    def __repr__(self) -> str:
        return comparison_table.text(self)

    def _repr_html_(self) -> str:
        return comparison_table.html(self)


def largest(fits: Callable[[int], bool], guess: int = 1, most: int = 2**20) -> int:
    """The largest number that fits, to within one or a tenth; 0: not even 1 fits. Doubles or halves from the
    guess, then bisects."""
    low, high = 0, most + 1
    while low < guess < high:
        if fits(guess):
            low, guess = guess, guess * 2
        else:
            high, guess = guess, guess // 2
    while high - low > max(1, low // 10):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
