"""The curves of many ranks as one: their mean, and the band from the lowest to the highest. `js/src/across.js` does the
same for the dashboard."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbtrain.watch.feed.series import BAD, Series

LATE = 32
"""points that a rank may be behind the others, whose last value still holds: they tell one after another"""


@dataclass(frozen=True, slots=True)
class AcrossRanks:
    """Has what a drawing asks of a curve."""

    curves: Sequence[Series]
    x: Sequence[float] = ()
    middle: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """NaN in a gap"""
    bad: Sequence[int] = ()
    """values that are not finite, as bits"""

    def at_most(self, buckets: int) -> AcrossRanks:
        """With so many points, about, at most: ranks that log at different steps have more of them together."""
        few = [curve.at_most(buckets) for curve in self.curves if len(curve)]
        for fewer in (buckets // 2, buckets // 4, buckets // 8):
            x = sorted({x for curve in few for x in curve.x})
            if len(x) <= buckets:
                break
            few = [curve.at_most(max(8, fewer)) for curve in few]
        x = sorted({x for curve in few for x in curve.x})
        most = max((curve.count for curve in few), default=0)
        over = [_over(x, curve, most - curve.count <= LATE) for curve in few]
        lows = [[y for y in column if y == y] for column in zip(*(low for low, _ in over), strict=True)]
        highs = [[y for y in column if y == y] for column in zip(*(high for _, high in over), strict=True)]
        middle = [_mean([*low, *high]) for low, high in zip(lows, highs, strict=True)]
        lowest = [min(column, default=math.nan) for column in lows]
        highest = [max(column, default=math.nan) for column in highs]
        return AcrossRanks(self.curves, x, middle, lowest, highest, _bad(x, few))


def _mean(values: Sequence[float]) -> float:
    """Of parts: the sum of the largest floats is infinite."""
    return math.fsum(value / len(values) for value in values) if values else math.nan


def _over(x: Sequence[float], curve: Series, constant: bool) -> tuple[list[float], list[float]]:
    """Its lowest and highest values over these x: where it has none it goes straight on, but not beyond its ends."""
    if list(curve.x) == x:
        return list(curve.low), list(curve.high)
    lows, highs = [], []
    for at in x:
        after = bisect_right(curve.x, at)
        before = after - 1
        if before < 0 or (after == len(curve) and at > curve.x[before] and not constant):
            lows.append(math.nan)
            highs.append(math.nan)
            continue
        part = (at - curve.x[before]) / (curve.x[after] - curve.x[before]) if after < len(curve) else 0.0
        for bounds, ys in ((lows, curve.low), (highs, curve.high)):
            bounds.append(ys[before] + part * (ys[after] - ys[before]) if part else ys[before])
    return lows, highs


def _bad(x: Sequence[float], curves: Sequence[Series]) -> list[int]:
    bad = dict.fromkeys(x, 0)
    for curve in curves:
        if any(curve.bad):
            for at, bits in zip(curve.x, curve.bad, strict=True):
                bad[at] |= bits
    return list(bad.values())


def _last_together(curves: Sequence[Series]) -> float | None:
    """The last x that all have. None: they end together, or never meet."""
    if len({(curve.count, curve.x[-1]) for curve in curves}) < 2:
        return None
    # Of joined neighbours only those that no value is added to are the same on all ranks.
    complete = [curve.x[:-1] if curve.width > 1 else curve.x for curve in curves]
    return max(set.intersection(*(set(x[-LATE - 1 :]) for x in complete)), default=None)


def _at(curve: Series, x: float) -> float:
    at = len(curve) - 1 - curve.x[::-1].index(x)
    bad = next((bit for bit in BAD if curve.bad[at] & bit), None)
    middle = curve.low[at] / 2 + curve.high[at] / 2
    return middle if bad is None or middle == middle else float(BAD[bad])


@dataclass(frozen=True, slots=True)
class Latest:
    """The last values of the ranks, in a few numbers."""

    ranks: int
    finite: Sequence[float]
    broken: Mapping[int, float]
    """rank → its last value, where that is not finite"""

    @property
    def mean(self) -> float:
        return _mean(self.finite)

    @property
    def value(self) -> float:
        """The mean; where no rank's value is finite, the first of them."""
        return self.mean if self.finite else next(iter(self.broken.values()), math.nan)


def latest(curves: Mapping[int, Series]) -> Latest:
    """At the last step that all ranks have: they tell one after another. One that is far behind has its last value."""
    known = {rank: curve for rank, curve in curves.items() if curve.count}
    most = max((curve.count for curve in known.values()), default=0)
    level = {rank: curve for rank, curve in known.items() if most - curve.count <= LATE}
    step = _last_together(list(level.values()))
    lasts = {
        rank: curve.last if step is None or rank not in level else _at(curve, step) for rank, curve in known.items()
    }
    broken = {rank: value for rank, value in lasts.items() if not math.isfinite(value)}
    return Latest(len(lasts), [value for rank, value in lasts.items() if rank not in broken], broken)
