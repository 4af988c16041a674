"""Tries a cell in several ways, to find the fastest, or the largest batch or model that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.compare.measured_way import largest
from nbtrain.annexes.planning.trials.attempt import Attempt, RunWay
from nbtrain.base.specs import Trial
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.session import Session

LONG, LONG_IN_ALL = 60.0, 240.0
"""Seconds that one attempt, or all attempts of one way, or rounds of all ways, may take before no more are made."""
ROUNDS, MOST_ROUNDS, BRIEF = 3, 8, 10.0
"""Trials of each way to find the fastest: at least, and at most, if the seconds allow more."""
CLOSE = 0.1
"""A batch may be smaller than asked by this share: validation loaders have other batches."""
MOST = 2**20
"""The largest batch that is tried, in samples."""

Told = Callable[[Comparison], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a comparison has to find out."""

    goal: str = "speed"
    """one of `comparison.GOALS`"""
    steps: int = 10
    memory: int = 0
    """bytes that a rank may take; 0: what the device has"""
    threads: int = 0
    """of each rank, on a CPU; 0: the default"""
    parameter: str = ""
    """for the goal `model`: the name that takes each of `values`"""
    values: tuple[Any, ...] = ()


def compare(session: Session, ways: Sequence[RunWay], cell: Cell, question: Question, told: Told) -> Comparison:
    """Try the cell in these ways, one by one. `told` is called with each result."""
    with session.trial():
        return Comparing(Attempt(session.shell, session.ranks, cell, question.memory), question, ways, told).run()


class Comparing:
    """Makes one comparison."""

    def __init__(self, attempt: Attempt, question: Question, ways: Sequence[RunWay], told: Told) -> None:
        """`told` is called with the comparison so far, whenever there is more."""
        self._attempt = attempt
        self._asked = question
        self._ways = ways
        self._tell = told
        names = [(way.name, way.line) for way in ways]
        self.found = Comparison.of(names, steps=question.steps, goal=question.goal, parameter=question.parameter)

    def run(self) -> Comparison:
        """The comparison; Stop ends it with what was found until then."""
        self._attempt.check(self._asked.parameter)
        began = time.monotonic()
        try:
            if self._asked.goal in ("batch", "model"):
                self._sizes(self._batch if self._asked.goal == "batch" else self._model)
            else:
                self._speeds()
        except KeyboardInterrupt:
            self._end("stopped")
        except BaseException as error:  # an error of the cell itself: every way would raise it
            self._end(str(error).split("\n")[0])
            raise
        self.found = replace(self.found, seconds=time.monotonic() - began, over=True)
        self._tell(self.found)
        return self.found

    def _end(self, why: str) -> None:
        for at, row in enumerate(self.found.rows):
            if row.state in ("waiting", "running"):
                self._note(at, state="done" if row.paces else "failed", why=why)

    def _note(self, at: int, **changes: Any) -> None:
        self.found = self.found.with_row(at, **changes)
        self._tell(self.found)

    def _trial(self, **what: Any) -> Trial:
        """The first step allocates what all others use; for speed one more is not timed."""
        warm = 2 if self._asked.goal in ("speed", "growth") else 1
        return Trial(steps=self._asked.steps, warm=warm, threads=self._asked.threads, **what)

    def _speeds(self) -> None:
        """Try all ways in rounds, each round in the opposite order of the last: what else the machine does slows all of
        them alike, and shows as the spread of the trials."""
        began = time.monotonic()
        order = list(range(len(self._ways)))
        trials: list[list[dict[str, Any]]] = [[] for _ in self._ways]
        for number in range(1 if self._asked.goal == "growth" else MOST_ROUNDS):
            if not order or (number and time.monotonic() - began > (BRIEF if number >= ROUNDS else LONG_IN_ALL)):
                break
            for at in order if number else ():
                self._note(at, state="waiting")
            for at in order:
                self._note(at, state="running")
                trials[at].append(self._attempt.try_out(self._ways[at], self._trial()))
                self._note(at, **_together(trials[at]))
            order = [at for at in reversed(order) if self.found.rows[at].state == "done"]

    def _sizes(self, find: Callable[[int, RunWay], None]) -> None:
        for at, way in enumerate(self._ways):
            self._note(at, state="running")
            find(at, way)

    def _batch(self, at: int, way: RunWay) -> None:
        attempts = Attempts()
        self._note(at, why="trying the batch as it is")
        first = attempts.make(0, lambda: self._attempt.try_out(way, self._trial()))
        size = first.get("batch") or self._attempt.batch()
        if not size:
            self._note(at, state="failed", why=NO_LOADER)
            return
        attempts.rename(0, size)
        if first["state"] != "done" and not first.get("no_memory"):
            self._note(at, **_row(first))
            return

        def fits(number: int) -> bool:
            if number not in attempts.made:
                if attempts.long and number > (attempts.most or 0):
                    return False
                self._note(at, size=number, why=f"trying a batch of {number:,}")
                trial = self._trial(batch=number / size)
                attempts.make(number, lambda: _grown(self._attempt.try_out(way, trial), number))
            return attempts.worked(number)

        with self._stopped(at, attempts, lambda number: f"a batch of {number:,}"):
            largest(fits, guess=size, most=MOST)

    def _model(self, at: int, way: RunWay) -> None:
        attempts = Attempts()
        name, values = self._asked.parameter, self._asked.values
        with self._stopped(at, attempts, lambda number: f"{name} = {values[number]!r}", values):
            for number, value in enumerate(values):
                self._note(at, why=f"trying {name} = {value!r}")
                trial = self._trial(names={name: value})
                attempts.make(number, partial(self._attempt.try_out, way, trial))
                if not attempts.worked(number):
                    break

    @contextmanager
    def _stopped(
        self, at: int, attempts: Attempts, words: Callable[[int], str], sizes: Sequence[Any] | None = None
    ) -> Iterator[None]:
        """Around attempts: show what they have found in the row, also where Stop ends them. `sizes`: what the numbers
        are indices of."""
        why = ""
        try:
            yield
        except KeyboardInterrupt:
            why = "stopped"
            raise
        finally:
            if attempts.made and (not why or attempts.most is not None):
                row = attempts.row(words)
                size = row["size"] if sizes is None or row["size"] is None else sizes[row["size"]]
                self._note(at, **{**row, "size": size, "why": why or row["why"]})


class Attempts:
    """The attempts of one way, by size, or by index in a list of sizes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.made: dict[int, dict[str, Any]] = {}
        self.long = False
        """they took so long that no larger one is made"""
        self._clock = clock
        self._began = clock()

    def make(self, number: int, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = self._clock()
        told = self.made[number] = attempt()
        now = self._clock()
        self.long = now - began > LONG or now - self._began > LONG_IN_ALL
        return told

    def rename(self, old: int, new: int) -> None:
        self.made[new] = self.made.pop(old)

    def worked(self, number: int) -> bool:
        return bool(self.made[number]["state"] == "done")

    @property
    def most(self) -> int | None:
        return max(filter(self.worked, self.made), default=None)

    def row(self, words: Callable[[int], str]) -> dict[str, Any]:
        """The row to show, once no more attempts are made."""
        most = self.most
        beyond = min((number for number in self.made if most is None or number > most), default=None)
        why = ""
        if beyond is not None:
            why = f"{words(beyond)}: {self.made[beyond].get('why', '')}"
        elif self.long:
            why = "larger ones were not tried, for want of time: --memory SIZE and --steps 1 make it quicker"
        # one of them is there: something was tried
        return {**_row(self.made[beyond if most is None else most]), "size": most, "why": why}  # type: ignore[index]


def _grown(told: dict[str, Any], number: int) -> dict[str, Any]:
    """The result of an attempt with batches of `number` samples: failed unless it had them."""
    if told["state"] == "done" and not told["grown"]:
        told = {**told, "state": "failed", "why": NO_LOADER}
    elif told["state"] == "done" and told["batch"] < number * (1 - CLOSE):
        told = {**told, "state": "failed", "why": f"the data has no more than {told['batch']:,} samples for it"}
    return {**told, "batch": number}


def _row(told: dict[str, Any]) -> dict[str, Any]:
    """The part of an attempt that a row shows."""
    return {"why": "", **{name: value for name, value in told.items() if name != "grown"}}


def _together(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one way after these trials: their means, and the most memory. A trial that failed speaks for all."""
    *before, last = map(_row, trials)
    if last["state"] != "done":
        return {**last, "paces": ()}
    every = [*before, last]
    means = {name: mean(one[name] for one in every) for name in ("steps_per_second", "samples_per_second", "step")}
    paces = tuple(one["samples_per_second"] or one["steps_per_second"] for one in every)
    memory = tuple(map(max, zip(*(one["memory"] for one in every), strict=True)))
    return {**last, **means, "memory": memory, "paces": paces}


NO_LOADER = (
    "no DataLoader gives the loop its batches. Let the cell read their size from a name of the notebook, and write "
    "--find-model NAME=8,16,32 with it"
)
