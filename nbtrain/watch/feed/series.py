"""Keeps a curve of any length in bounded memory: when there are too many points, neighbours become one bucket with
their lowest and highest value, so that no spike is lost. The front end's `series.js` does the same."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

LIMIT = 4096
"""buckets of a curve, at most"""
NAN, INF, MINUS_INF = 1, 2, 4
"""values that are not finite, as bits"""
BAD = {NAN: "NaN", INF: "Infinity", MINUS_INF: "-Infinity"}
"""the same in messages, which JSON and JavaScript both read"""
SHORT = {NAN: "NaN", INF: "inf", MINUS_INF: "-inf"}
"""the same for people, as PyTorch prints them"""

Value = float | int | str | None
"""a number of a message; a word where it is not finite"""


class Series:
    """One curve. Values that are not finite leave a gap; they are counted, and may be the last value."""

    __slots__ = ("_open", "bad", "count", "high", "last", "limit", "low", "width", "x")

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.x = array("d")
        """where each bucket begins"""
        self.low = array("d")
        self.high = array("d")
        """NaN in a gap"""
        self.bad = array("B")
        """which values came in each bucket that are not finite, as bits"""
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
            finite = math.isfinite(y)
            known = y if finite else math.nan
            bad = 0 if finite else bits_of(y)
            if 0 < self._open < self.width:
                self.low[-1] = _lower(self.low[-1], known)
                self.high[-1] = _higher(self.high[-1], known)
                self.bad[-1] |= bad
                self._open += 1
                continue
            self.x.append(x)
            self.low.append(known)
            self.high.append(known)
            self.bad.append(bad)
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

    @property
    def middle(self) -> Sequence[float]:
        """The middle of each bucket, through which its line goes."""
        return [low / 2 + high / 2 for low, high in zip(self.low, self.high, strict=True)]

    def at_most(self, buckets: int) -> Series:
        """Itself, or a copy with fewer buckets."""
        joined = 1
        while -(-len(self) // joined) > max(2, buckets):
            joined *= 2
        return self if joined == 1 else self._joined(joined)

    def message(self) -> dict[str, Any]:
        """The curve as JSON can hold it, without NaN."""
        return {
            "x": [number(x) for x in self.x],
            "low": [number(y) for y in self.low],
            "high": [number(y) for y in self.high],
            "last": value(self.last),
            "count": self.count,
            "width": self.width,
            **({"bad": list(self.bad)} if any(self.bad) else {}),
        }

    def _halve(self) -> None:
        half = self._joined(2)
        self._open += (len(self) - 1) % 2 * self.width
        self.x, self.low, self.high, self.bad, self.width = half.x, half.low, half.high, half.bad, half.width

    def _joined(self, many: int) -> Series:
        """A copy in which that many neighbours are one bucket."""
        joined = Series(self.limit)
        starts = range(0, len(self), many)
        lowest, highest = (_low, _high) if any(self.bad) else (min, max)
        joined.x = self.x[::many]
        joined.low = array("d", [lowest(self.low[i : i + many]) for i in starts])
        joined.high = array("d", [highest(self.high[i : i + many]) for i in starts])
        joined.bad = array("B", [_either(self.bad[i : i + many]) for i in starts])
        joined.last, joined.count, joined.width = self.last, self.count, self.width * many
        joined._open = self._open + (len(self) - 1) % many * self.width
        return joined


def points(series: Series) -> tuple[list[Value], list[Value]]:
    """(x, y) to add to another curve: of each bucket the lowest and highest, what is not finite, and last the last
    value."""
    xs: list[Value] = []
    ys: list[Value] = []
    for x, low, high, bad in zip(series.x, series.low, series.high, series.bad, strict=True):
        finite = [] if low != low else [low] if low == high else [low, high]
        values = [*map(number, finite), *(word for bit, word in BAD.items() if bad & bit)]
        xs += [number(x)] * len(values)
        ys += values
    last = value(series.last)
    if ys and ys[-1] != last:
        if series.width > 1 and ys[-2:-1] == [last]:  # of two extremes the order is not known
            ys[-2:] = [ys[-1], last]
        else:
            xs.append(xs[-1])
            ys.append(last)
    return xs, ys


def value(y: float) -> Value:
    """The number with few digits; a word where it is not finite."""
    return number(y) if math.isfinite(y) else BAD[bits_of(y)]


def not_finite(bits: int) -> str:
    """`NaN and inf`: which values came."""
    return " and ".join(word for bit, word in SHORT.items() if bits & bit)


def number(value: float | None) -> float | int | None:
    """The number with few digits; None where it is not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}") if abs(value) < 1e5 else float(f"{value:.9g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def bits_of(y: float) -> int:
    """Which value it is that is not finite."""
    return NAN if y != y else INF if y > 0 else MINUS_INF


def _lower(a: float, b: float) -> float:
    return a if b != b or a <= b else b


def _higher(a: float, b: float) -> float:
    return a if b != b or a >= b else b


def _low(values: Sequence[float]) -> float:
    return reduce(_lower, values)


def _high(values: Sequence[float]) -> float:
    return reduce(_higher, values)


def _either(bits: Sequence[int]) -> int:
    return reduce(or_, bits)
