"""How fast a count grows."""

from __future__ import annotations

from collections import deque

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
