"""One chart: curves over a pair of axes, each in its band, and marks where something came that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from nbtrain.watch.svg.base import (
    BAD,
    LINE,
    LONGEST,
    TEXT,
    Plot,
    Range,
    Words,
    colour,
    draw_title,
    escaped,
    moved,
    short,
)
from nbtrain.watch.svg.legend import Legend, draw_legend

SIZE = (250, 114)
"""width and height"""
TITLE = 24
"""letters that fit into a title beside a text on the right"""
BAND = 0.22
"""opacity of the band around a line"""

Bucket = tuple[float, float, float, float]
"""x, low, high, middle"""


class Curve(Protocol):
    """A line through the middles of buckets, as `watch.series.Series` keeps them, in a band from their lowest to their
    highest values; NaN is a gap. `bad`: not 0 where a value came that is not finite."""

    @property
    def x(self) -> Sequence[float]: ...
    @property
    def low(self) -> Sequence[float]: ...
    @property
    def high(self) -> Sequence[float]: ...
    @property
    def middle(self) -> Sequence[float]: ...
    @property
    def bad(self) -> Sequence[int]: ...
    def at_most(self, buckets: int, /) -> Curve: ...


class Chart(NamedTuple):
    """Curves over one pair of axes."""

    title: str
    last: str
    """text on the right"""
    curves: Sequence[tuple[int, Curve]]
    """each with the number of its colour"""
    y: Words
    x: Words
    zero: bool
    """the axis begins at zero"""
    legend: Legend = ()
    """one line each, below the title"""
    broken: str = ""
    """what came that is not finite"""


def draw_chart(chart: Chart, points: int, lines: int) -> str:
    """`lines`: room for so many of a legend."""
    width, height = SIZE[0], SIZE[1] + lines * LINE
    few = [(number, curve.at_most(points)) for number, curve in chart.curves]
    buckets = [bucket for _, curve in few for part in _without_gaps(curve) for bucket in part]
    drawn = draw_title(short(chart.title, TITLE if chart.last else LONGEST))
    drawn += f'<text x="{width}" y="11" text-anchor="end">{escaped(chart.last)}</text>' if chart.last else ""
    drawn += "".join(moved(0, 15 + line * LINE, draw_legend([key])) for line, key in enumerate(chart.legend))
    bad = sorted({x for _, curve in few for x, bits in zip(curve.x, curve.bad, strict=True) if bits})
    if not buckets and not bad:
        return drawn
    first, end = min(curve.x[0] for _, curve in few if curve.x), max(curve.x[-1] for _, curve in few if curve.x)
    low, high = _heights(buckets, chart.zero)
    plot = Plot((46, 24 + lines * LINE, width, height - 16), (first, end), (low, high))
    for value, y in ((high, plot.top), (low, plot.foot)):
        if value == high or high > low:
            drawn += (
                f'<path d="M{plot.left} {y:.1f}H{width}" stroke="{TEXT}" stroke-opacity=".25"/>'
                f'<text x="{plot.left - 5}" y="{y + 4:.1f}" text-anchor="end" font-size="10">'
                f"{escaped(chart.y(value))}</text>"
            )
    drawn += (
        f'<text x="{plot.left}" y="{height - 3}" font-size="10">{chart.x(first)}</text>'
        f'<text x="{width}" y="{height - 3}" text-anchor="end" font-size="10">{chart.x(end)}</text>'
    )
    drawn += "".join(_curve(curve, colour(number), plot) for number, curve in few)
    return drawn + _marks(bad, chart.broken, plot)


def _heights(buckets: Sequence[Bucket], zero: bool) -> Range:
    """The range of the y axis; that of the dashboard where no value is finite."""
    lows = [low for _, low, _, _ in buckets] + [0.0] * (zero or not buckets)
    return min(lows), max((high for _, _, high, _ in buckets), default=1.0)


def _marks(xs: Sequence[float], word: str, plot: Plot) -> str:
    """Where a value came that is not finite: no line can show it."""
    if not xs:
        return ""
    drawn = "".join(f'<path d="M{plot.x(x) - 4:.1f} {plot.top}h8l-4 6z" fill="{BAD}"/>' for x in xs)
    x, early = plot.x(xs[0]), plot.x(xs[0]) < (plot.left + plot.right) / 2
    where = f'x="{x + (6 if early else -6):.1f}" y="{plot.top + 15}" text-anchor="{"start" if early else "end"}"'
    return f'{drawn}<text {where} font-size="10" font-weight="600" fill="{BAD}">{escaped(word)}</text>'


def _curve(curve: Curve, stroke: str, plot: Plot) -> str:
    drawn = ""
    for part in _without_gaps(curve):
        line = " ".join(f"{plot.x(x):.1f},{plot.y(middle):.1f}" for x, _, _, middle in part)
        if len(part) == 1:
            x, y = line.split(",")
            drawn += f'<circle cx="{x}" cy="{y}" r="2" fill="{stroke}"/>'
            continue
        if any(low < high for _, low, high, _ in part):
            rim = [f"{plot.x(x):.1f},{plot.y(high):.1f}" for x, _, high, _ in part]
            rim += [f"{plot.x(x):.1f},{plot.y(low):.1f}" for x, low, _, _ in reversed(part)]
            drawn += f'<polygon points="{" ".join(rim)}" fill="{stroke}" fill-opacity="{BAND}"/>'
        drawn += f'<polyline points="{line}" fill="none" stroke="{stroke}" stroke-width="1.5" stroke-linejoin="round"/>'
    return drawn


def _without_gaps(curve: Curve) -> Iterable[list[Bucket]]:
    """Runs of buckets between two gaps."""
    part: list[Bucket] = []
    for x, low, high, middle in zip(curve.x, curve.low, curve.high, curve.middle, strict=True):
        if low == low:
            part.append((x, low, high, middle))
        elif part:
            yield part
            part = []
    if part:
        yield part
