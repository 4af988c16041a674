"""Keeps a curve of any length in bounded memory: when there are too many points, neighbours become one bucket with
their lowest and highest value, so that no spike is lost. The front end's `series.js` does the same."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

LIMIT = 4096
"""buckets of a curve, at most"""


class Series:
    """One curve. Values that are not finite leave a gap; they are counted, and may be the last value."""

    __slots__ = ("_open", "count", "high", "last", "limit", "low", "width", "x")

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.x = array("d")
        """where each bucket begins"""
        self.low = array("d")
        self.high = array("d")
        """NaN in a gap"""
        self.last = math.nan
        """the value added last"""
        self.count = 0
        """points ever added"""
        self.width = 1
        """points in a bucket"""
        self._open = 0
        """points in the last bucket"""

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: float, y: float) -> None:
        self.extend(((x, y),))

    def extend(self, points: Sequence[tuple[float, float]]) -> None:
        """Add points (x, y) in order."""
        for x, y in points:
            known = y if math.isfinite(y) else math.nan
            if 0 < self._open < self.width:
                self.low[-1] = _lower(self.low[-1], known)
                self.high[-1] = _higher(self.high[-1], known)
                self._open += 1
                continue
            self.x.append(x)
            self.low.append(known)
            self.high.append(known)
            self._open = 1
            if len(self.x) >= self.limit:
                self._halve()
        if points:
            self.last = points[-1][1]
            self.count += len(points)

    def buckets(self) -> Iterator[tuple[float, float, float]]:
        """(x, low, high) of each bucket that is not a gap."""
        for x, low, high in zip(self.x, self.low, self.high, strict=True):
            if low == low:
                yield x, low, high

    def at_most(self, buckets: int) -> Series:
        """Itself, or a copy with fewer buckets."""
        if len(self) <= max(2, buckets):
            return self
        found = Series(self.limit)
        for name in ("x", "low", "high"):
            setattr(found, name, getattr(self, name)[:])
        found.last, found.count, found.width, found._open = self.last, self.count, self.width, self._open
        while len(found) > max(2, buckets):
            found._halve()
        return found

    def message(self) -> dict[str, Any]:
        """The curve as JSON can hold it, without NaN."""
        return {
            "x": [number(x) for x in self.x],
            "low": [number(y) for y in self.low],
            "high": [number(y) for y in self.high],
            "last": number(self.last),
            "count": self.count,
            "width": self.width,
        }

    def _halve(self) -> None:
        odd = len(self) % 2
        pairs = range(0, len(self) - odd, 2)
        x, low, high = self.x, self.low, self.high
        tail = len(self) - odd
        self.x = array("d", [x[i] for i in pairs]) + x[tail:]
        self.low = array("d", [_lower(low[i], low[i + 1]) for i in pairs]) + low[tail:]
        self.high = array("d", [_higher(high[i], high[i + 1]) for i in pairs]) + high[tail:]
        self._open += 0 if odd else self.width
        self.width *= 2


def points(series: Series) -> tuple[list[float | None], list[float | None]]:
    """(x, y) to add to another curve: the lowest and highest of each bucket, and last the last value."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for x, low, high in zip(series.x, series.low, series.high, strict=True):
        values: Sequence[float] = (low,) if low == high or low != low else (low, high)
        xs += [number(x)] * len(values)
        ys += map(number, values)
    last = number(series.last)
    if ys and ys[-1] != last:
        if series.width > 1 and ys[-2:-1] == [last]:  # of two extremes the order is not known
            ys[-2:] = [ys[-1], last]
        else:
            xs.append(xs[-1])
            ys.append(last)
    return xs, ys


def number(value: float | None) -> float | int | None:
    """The number with few digits; None where it is not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}") if abs(value) < 1e5 else float(f"{value:.9g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _lower(a: float, b: float) -> float:
    return a if b != b or a <= b else b


def _higher(a: float, b: float) -> float:
    return a if b != b or a >= b else b
