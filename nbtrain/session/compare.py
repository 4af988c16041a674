"""What is found out by trying a cell in several ways: which is fastest, and what is the largest that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nbtrain.errors import UsageError
from nbtrain.planning.comparison import Comparison
from nbtrain.planning.search import largest
from nbtrain.session.trying import Tries, Way
from nbtrain.specs import Trial

LONG = 60.0
"""Seconds that one attempt may take before no larger one is made."""
MOST = 2**20
"""Samples in a batch; more are not tried."""

Told = Callable[[Comparison], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be found out."""

    goal: str = "speed"
    """one of `comparison.GOALS`"""
    steps: int = 10
    memory: int = 0
    """bytes that a rank may come to have; 0: what the device has"""
    threads: int = 0
    """of each rank, on a CPU; 0: as many as otherwise"""
    parameter: str = ""
    """for the goal `model`: the name, and what it is to hold"""
    values: tuple[Any, ...] = ()


class Comparing:
    """One comparison."""

    def __init__(self, tries: Tries, question: Question, ways: Sequence[Way], told: Told) -> None:
        """`told`: is called with what is known so far, whenever that is more."""
        self._tries = tries
        self._asked = question
        self._ways = ways
        self._tell = told
        names = [(way.name, way.line) for way in ways]
        self.found = Comparison.of(names, steps=question.steps, goal=question.goal, parameter=question.parameter)

    def run(self) -> Comparison:
        """Stop ends it with what was found until then."""
        if self._asked.goal == "model":
            self._tries.check_reads(self._asked.parameter)
        began = time.monotonic()
        find = {"batch": self._batch, "model": self._model}.get(self._asked.goal, self._speed)
        try:
            for at, way in enumerate(self._ways):
                self._note(at, state="running")
                find(at, way)
        except KeyboardInterrupt:
            for at, row in enumerate(self.found.rows):
                if row.state in ("waiting", "running"):
                    self._note(at, state="failed", why="stopped")
        self.found = replace(self.found, seconds=time.monotonic() - began, over=True)
        self._tell(self.found)
        return self.found

    def _note(self, at: int, **changes: Any) -> None:
        self.found = self.found.with_row(at, **changes)
        self._tell(self.found)

    def _trial(self, **what: Any) -> Trial:
        """The first step makes what all others have; speed wants one more that is not timed."""
        warm = 2 if self._asked.goal in ("speed", "growth") else 1
        return Trial(steps=self._asked.steps, warm=warm, threads=self._asked.threads, **what)

    def _speed(self, at: int, way: Way) -> None:
        self._note(at, **_row(self._tries.try_out(way, self._trial())))

    def _batch(self, at: int, way: Way) -> None:
        attempts = Attempts()
        self._note(at, why="trying the batch as it is")
        first = attempts.make(0, lambda: self._tries.try_out(way, self._trial()))
        size = first.get("batch") or self._tries.batch()
        if not size:
            raise UsageError(NO_LOADER)
        attempts.rename(0, size)
        if first["state"] != "done" and not first.get("no_memory"):
            self._note(at, **_row(first))
            return

        def fits(number: int) -> bool:
            if number not in attempts.made:
                if attempts.long and number > (attempts.most or 0):
                    return False
                self._note(at, size=number, why=f"trying a batch of {number:,}")
                told = attempts.make(
                    number, lambda: self._tries.try_out(way, self._trial(batch=number / size)) | {"batch": number}
                )
                if told["state"] == "done" and not told["grown"]:
                    raise UsageError(NO_LOADER)
            return attempts.worked(number)

        largest(fits, guess=size, most=MOST)
        self._note(at, **attempts.row(lambda number: f"a batch of {number:,}"))

    def _model(self, at: int, way: Way) -> None:
        attempts = Attempts()
        name, values = self._asked.parameter, self._asked.values
        for number, value in enumerate(values):
            self._note(at, why=f"trying {name} = {value!r}")
            trial = self._trial(names={name: value})
            attempts.make(number, partial(self._tries.try_out, way, trial))
            if not attempts.worked(number):
                break
        row = attempts.row(lambda number: f"{name} = {values[number]!r}")
        if row["size"] is not None:
            row["size"] = values[row["size"]]
        self._note(at, **row)


class Attempts:
    """By number: sizes, or places in a list of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.made: dict[int, dict[str, Any]] = {}
        self.long = False
        """the last one took so long that a larger one is not made"""
        self._clock = clock

    def make(self, number: int, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = self._clock()
        told = self.made[number] = attempt()
        self.long = self._clock() - began > LONG
        return told

    def rename(self, old: int, new: int) -> None:
        self.made[new] = self.made.pop(old)

    def worked(self, number: int) -> bool:
        return bool(self.made[number]["state"] == "done")

    @property
    def most(self) -> int | None:
        """The largest that worked."""
        return max(filter(self.worked, self.made), default=None)

    def row(self, words: Callable[[int], str]) -> dict[str, Any]:
        """What is found, once no more attempts are made."""
        most = self.most
        beyond = min((number for number in self.made if most is None or number > most), default=None)
        why = ""
        if beyond is not None:
            why = f"{words(beyond)}: {self.made[beyond].get('why', '')}"
        elif self.long:
            why = f"more was not tried: {words(max(self.made))} took more than {LONG:.0f} s"
        return {**_row(self.made[beyond if most is None else most]), "size": most, "why": why}  # type: ignore[index]


def _row(told: dict[str, Any]) -> dict[str, Any]:
    """What of an attempt a row shows."""
    return {"why": "", **{name: value for name, value in told.items() if name != "grown"}}


NO_LOADER = (
    "--find-batch changes how many samples a DataLoader puts into a batch, and this loop takes its batches from "
    "elsewhere. Let the cell read the batch's size from a name of the notebook, and write --find-model NAME=8,16,32 "
    "with that name"
)
