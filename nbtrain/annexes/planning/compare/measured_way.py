"""What was measured when a training loop ran a few steps under one strategy, and the search for the largest size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import stdev

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
