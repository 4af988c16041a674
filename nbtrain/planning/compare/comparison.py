"""What was measured when a loop ran for a few steps in several ways: plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nbtrain.planning.compare import table as comparison_table

STATES = ("waiting", "running", "done", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWay:
    """One way of running the loop, and what came of it."""

    name: str
    """`fsdp`, `ddp · batch 64`"""
    line: str
    """the options of this way alone, as they are typed: `--strategy fsdp --devices 4`"""
    state: str = "waiting"
    """one of STATES"""
    ranks: int = 0
    memory: tuple[int, ...] = ()
    """bytes at the most, for each rank"""
    steps: int = 0
    """that were timed"""
    step: float = 0.0
    """seconds that one of them took: the median, of the slowest rank"""
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    """of all ranks together; 0: no loader said how many samples there are"""
    batch: int = 0
    """samples of one step on one rank; 0: not known"""
    size: float | None = None
    """what the batch or the size parameter was in this row, where one was looked for"""
    why: str = ""
    """it failed: in a sentence"""
    no_memory: bool = False
    """that was for want of memory"""

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def pace(self) -> float:
        """What rows are compared by."""
        return self.samples_per_second or self.steps_per_second


GOALS = ("speed", "batch", "model", "growth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rows in the order in which they were asked for."""

    rows: tuple[MeasuredWay, ...]
    steps: int
    goal: str = "speed"
    """one of GOALS: the fastest, the largest batch, the largest model; or how it grows, where none is the best"""
    parameter: str = ""
    """the name that was changed, where the goal is a model"""
    seconds: float = 0.0
    """that all of it took"""
    over: bool = False

    @property
    def best(self) -> MeasuredWay | None:
        """Of those that worked: the fastest; or the one with the largest size, and of equal ones the fastest."""
        done = [row for row in self.rows if row.state == "done"]
        if self.goal == "growth":
            return None
        if self.goal == "speed":
            return max(done, key=lambda row: row.pace, default=None)
        return max(done, key=lambda row: (row.size or 0, row.pace), default=None)

    def with_row(self, at: int, **changes: Any) -> Comparison:
        rows = list(self.rows)
        rows[at] = replace(rows[at], **changes)
        return replace(self, rows=tuple(rows))

    @staticmethod
    def of(names: Iterable[tuple[str, str]], **what: Any) -> Comparison:
        """Nothing is measured yet. `names`: name and line of each row."""
        return Comparison(rows=tuple(MeasuredWay(name=name, line=line) for name, line in names), **what)

    def data(self) -> dict[str, Any]:
        """Plain data, for a front end."""
        return comparison_table.data(self)

    def __repr__(self) -> str:
        return comparison_table.text(self)

    def _repr_html_(self) -> str:
        return comparison_table.html(self)
