"""Measures time only while this process runs: not while a laptop sleeps or a job is stopped."""

from __future__ import annotations

import time

LONGEST = 0.25
"""Seconds between two readings that count, at most."""


class Stopwatch:
    """Counts seconds from when it is made. Read it often: of a pause between two readings, at most LONGEST counts."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._seen = time.monotonic()

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        self._sum += min(now - self._seen, LONGEST)
        self._seen = now
        return self._sum


class AwakeTimeout:
    """`over` is true once these seconds have passed. Read it often, like a Stopwatch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watch = Stopwatch()

    @property
    def over(self) -> bool:
        return self._watch.seconds > self._seconds


class UnchangedTimer:
    """Tells for how many seconds a state has not changed. Read it often, like a Stopwatch."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._known: dict[int, tuple[object, float]] = {}

    def seconds(self, of: int, state: object) -> float:
        now = self._watch.seconds
        before = self._known.get(of)
        if before is None or before[0] != state:
            before = self._known[of] = state, now
        return now - before[1]
