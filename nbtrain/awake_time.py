"""Time that does not count while this process did not run: a laptop that slept, a job that was stopped for a while."""

from __future__ import annotations

import time

LONGEST = 0.25
"""Seconds that may lie between two looks; of more than that, no more counts."""


class Stopwatch:
    """Runs from the moment it is made. Has to be looked at all the time."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._seen = time.monotonic()

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        self._sum += min(now - self._seen, LONGEST)
        self._seen = now
        return self._sum


class Patience:
    """So many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watch = Stopwatch()

    @property
    def over(self) -> bool:
        return self._watch.seconds > self._seconds


class Standing:
    """For how many seconds something has been as it is. Has to be looked at all the time, too."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._known: dict[int, tuple[object, float]] = {}

    def seconds(self, of: int, state: object) -> float:
        now = self._watch.seconds
        before = self._known.get(of)
        if before is None or before[0] != state:
            before = self._known[of] = state, now
        return now - before[1]
