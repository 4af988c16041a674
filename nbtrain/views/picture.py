"""Charts as one SVG image: it needs no script and no style sheet, so it looks the same wherever a notebook is shown.
Its colours can be read on light and on dark ground."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

from nbtrain.events import PHASES
from nbtrain.views.base import CURVES, duration, metric
from nbtrain.watch.figures import Figures, RankFigures
from nbtrain.watch.series import Series
from nbtrain.words import quantity, size

COLOURS = ("#3b8bd0", "#dd6b33", "#3d9b57", "#9b6bd6", "#ab8619", "#d4558c", "#22929e", "#7b8594")
OF_PHASE = dict(zip(PHASES, (4, 0, 3, 1, 2, 7), strict=True))
NAMES = dict(zip(PHASES, ("data", "forward", "backward", "other ranks", "optimizer", "rest"), strict=True))
TEXT = "#767676"
RANKS = len(COLOURS)
"""of so many the curves are shown"""
POINTS = 2048
"""of all curves together"""
LATELY = 8
"""points; a single step says little"""

NARROW = "fijlrt "
"""about half as wide as other letters"""

WIDTH, HEIGHT, GAP, COLUMNS = 236, 112, 20, 3
LEFT, TOP, BOTTOM = 46, 22, 16
ROW = 16

Words = Callable[[float], str]


class Chart(NamedTuple):
    title: str
    last: str
    """what is said on the right"""
    curves: list[tuple[int, Series]]
    """by rank"""
    y: Words
    x: Words
    zero: bool
    """the axis begins at zero"""


def colour(rank: int) -> str:
    return COLOURS[rank % RANKS]


def picture(figures: Figures) -> str:
    """All there is to draw; empty while there is nothing."""
    ranks = list(figures.ranks.items())[:RANKS]
    charts = _charts(ranks)
    bars = [(rank, one, parts) for rank, one in ranks if (parts := _parts(one))]
    if not charts and not bars:
        return ""
    columns = min(COLUMNS, len(charts)) or 1
    width = max(columns * (WIDTH + GAP) - GAP, 2 * WIDTH + GAP if bars else 0)
    points = max(24, POINTS // max(1, sum(len(chart.curves) for chart in charts)))
    drawn = [
        _at(i % columns * (WIDTH + GAP), i // columns * (HEIGHT + GAP), _chart(chart, points))
        for i, chart in enumerate(charts)
    ]
    height = -(-len(charts) // columns) * (HEIGHT + GAP)
    if charts and len(ranks) > 1:
        drawn.append(_at(0, height, _legend([(f"rank {rank}", colour(rank)) for rank, _ in ranks])))
        height += ROW + GAP // 2
    if bars:
        drawn.append(_at(0, height, _phases(bars, width)))
        height += (len(bars) + 2) * ROW + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11" fill="{TEXT}">'
        f"<title>{escape(_told(charts))}</title>{''.join(drawn)}</svg>"
    )


def _charts(ranks: Sequence[tuple[int, RankFigures]]) -> list[Chart]:
    names = list(dict.fromkeys(name for _, one in ranks for name in one.metrics))
    found = []
    for name in names[:CURVES]:
        curves = [(rank, one.metrics[name]) for rank, one in ranks if name in one.metrics]
        found.append(Chart(name, metric(curves[0][1].last), curves, _brief, _step, False))
    for title, curve, words in (
        ("samples/s", "speed/samples", quantity),
        ("memory", "memory/used", size),
        ("FLOP/s", "compute/tflops", _operations),
    ):
        curves = [(rank, one.curves[curve]) for rank, one in ranks if curve in one.curves]
        if any(len(series) > 1 for _, series in curves):
            lasts = [series.last for _, series in curves]
            last = words(max(lasts)) if curve == "memory/used" else words(sum(lasts))
            several = len(curves) > 1 and curve != "memory/used"
            found.append(Chart(title, f"{last} in all" if several else last, curves, words, duration, True))
    return found


def _told(charts: Iterable[Chart]) -> str:
    return ", ".join(f"{chart.title} {chart.last}" for chart in charts)


def _chart(chart: Chart, points: int) -> str:
    few = [(rank, series.at_most(points)) for rank, series in chart.curves]
    buckets = [bucket for _, series in few for bucket in series.buckets()]
    title = (
        f'<text x="0" y="11" font-weight="600" font-size="12">{escape(_short(chart.title))}</text>'
        f'<text x="{WIDTH}" y="11" text-anchor="end">{escape(chart.last)}</text>'
    )
    if not buckets:
        return title
    first, end = min(x for x, _, _ in buckets), max(x for x, _, _ in buckets)
    low = min(0.0 if chart.zero else math.inf, *(low for _, low, _ in buckets))
    high = max(high for _, _, high in buckets)
    plot = _Plot(first, end, low, high)
    foot = HEIGHT - BOTTOM
    axes = "".join(
        f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="{TEXT}" stroke-opacity=".25"/>'
        f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end" font-size="10">{escape(chart.y(value))}</text>'
        for value, y in ((high, TOP), (low, foot))
        if value == high or high > low
    )
    axes += (
        f'<text x="{LEFT}" y="{HEIGHT - 3}" font-size="10">{chart.x(first)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 3}" text-anchor="end" font-size="10">{chart.x(end)}</text>'
    )
    return title + axes + "".join(_curve(series, colour(rank), plot) for rank, series in few)


class _Plot:
    """Where a value lies."""

    def __init__(self, first: float, end: float, low: float, high: float) -> None:
        self._first, self._low = first, low / 2
        self._across = (WIDTH - LEFT) / ((end - first) or 1)
        self._span = high / 2 - low / 2  # halves: the difference of the largest floats is infinite

    def x(self, value: float) -> float:
        return LEFT + (value - self._first) * self._across

    def y(self, value: float) -> float:
        share = (value / 2 - self._low) / self._span if self._span else 0.5
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _curve(series: Series, stroke: str, plot: _Plot) -> str:
    """A line through the middle of the buckets, in a band from their lowest to their highest."""
    drawn = ""
    for part in _unbroken(series):
        line = " ".join(f"{plot.x(x):.1f},{plot.y(low / 2 + high / 2):.1f}" for x, low, high in part)
        if len(part) == 1:
            x, y = line.split(",")
            drawn += f'<circle cx="{x}" cy="{y}" r="2" fill="{stroke}"/>'
            continue
        if series.width > 1:
            rim = [f"{plot.x(x):.1f},{plot.y(high):.1f}" for x, _, high in part]
            rim += [f"{plot.x(x):.1f},{plot.y(low):.1f}" for x, low, _ in reversed(part)]
            drawn += f'<polygon points="{" ".join(rim)}" fill="{stroke}" fill-opacity=".22"/>'
        drawn += f'<polyline points="{line}" fill="none" stroke="{stroke}" stroke-width="1.5" stroke-linejoin="round"/>'
    return drawn


def _unbroken(series: Series) -> Iterable[list[tuple[float, float, float]]]:
    """The buckets between two gaps."""
    part: list[tuple[float, float, float]] = []
    for x, low, high in zip(series.x, series.low, series.high, strict=True):
        if low == low:
            part.append((x, low, high))
        elif part:
            yield part
            part = []
    if part:
        yield part


def _parts(one: RankFigures) -> dict[str, float]:
    """Milliseconds of a step in each phase, lately; empty where that is not known."""
    found = {}
    for phase in PHASES:
        series = one.curves.get(f"phases/{phase}")
        if series is None:
            return {}
        some = list(series.buckets())[-LATELY:]
        found[phase] = fmean(low / 2 + high / 2 for _, low, high in some) if some else 0.0
    return found if sum(found.values()) > 0 else {}


def _phases(bars: Sequence[tuple[int, RankFigures, dict[str, float]]], width: int) -> str:
    drawn = '<text x="0" y="11" font-weight="600" font-size="12">a step, lately</text>'
    longest = max(sum(parts.values()) for _, _, parts in bars)
    across = (width - LEFT - 70) / longest
    for line, (rank, _, parts) in enumerate(bars):
        x, y = float(LEFT), 18 + line * ROW
        drawn += f'<text x="{LEFT - 5}" y="{y + 10}" text-anchor="end" font-size="10">rank {rank}</text>'
        for phase, took in parts.items():
            wide = took * across
            drawn += f'<rect x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="10" fill="{COLOURS[OF_PHASE[phase]]}"/>'
            x += wide
        drawn += f'<text x="{x + 5:.1f}" y="{y + 10}" font-size="10">{_milliseconds(sum(parts.values()))}</text>'
    names = [(NAMES[phase], COLOURS[OF_PHASE[phase]]) for phase in PHASES if any(parts[phase] for *_, parts in bars)]
    return drawn + _at(LEFT, 22 + len(bars) * ROW, _legend(names))


def _legend(names: Iterable[tuple[str, str]]) -> str:
    drawn, x = "", 0
    for name, fill in names:
        drawn += f'<rect x="{x}" y="3" width="10" height="8" fill="{fill}"/><text x="{x + 14}" y="11">{name}</text>'
        x += 28 + round(sum(3.5 if letter in NARROW else 6.5 for letter in name))
    return drawn


def _at(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:.0f},{y:.0f})">{drawn}</g>'


def _step(value: float) -> str:
    return f"step {value:,.0f}"


def _brief(value: float) -> str:
    return narrow(f"{value:.3g}", value)


def narrow(said: str, value: float) -> str:
    """What fits beside an axis: 8.1e-5 for 8.07e-05."""
    return said if len(said) <= 7 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _operations(tera: float) -> str:
    """31.2 T, 540 G"""
    for unit, one in (("T", 1.0), ("G", 1e-3), ("M", 1e-6)):
        if tera >= one:
            return f"{quantity(tera / one)} {unit}"
    return quantity(1e12 * tera)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def _milliseconds(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def past(charts: Sequence[Chart], names: Sequence[str]) -> str:
    """Charts of runs that are over, each curve with the colour of its number; `names`: of those numbers."""
    columns = min(2, len(charts))
    width, lines = columns * (WIDTH + GAP) - GAP, -(-len(charts) // columns)
    height = lines * (HEIGHT + GAP)
    points = max(24, POINTS // max(1, sum(len(chart.curves) for chart in charts)))
    drawn = [
        _at(i % columns * (WIDTH + GAP), i // columns * (HEIGHT + GAP), _chart(chart, points))
        for i, chart in enumerate(charts)
    ]
    if len(names) > 1:
        shown = [(escape(name), colour(number)) for number, name in enumerate(names[:RANKS])]
        more = [(f"and {len(names) - RANKS} more", "none")] if len(names) > RANKS else []
        for at in range(0, len(shown + more), 4):
            drawn.append(_at(0, height, _legend((shown + more)[at : at + 4])))
            height += ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11" fill="{TEXT}">'
        f"<title>{escape(_told(charts))}</title>{''.join(drawn)}</svg>"
    )
