"""Draws curves over a run and scatter plots as one SVG, without script or style sheet, so that every page that shows a
notebook shows them. All colours are readable on light and on dark ground."""

from __future__ import annotations

import base64
import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, Protocol

COLOURS = ("#3b8bd0", "#dd6b33", "#3d9b57", "#9b6bd6", "#ab8619", "#d4558c", "#22929e", "#7b8594")
PLAIN, BOLD, *_ = COLOURS
BAD = "#d5473c"
TEXT = "#767676"
INK = "color:var(--jp-ui-font-color1,currentColor)"
"""the text colour of the page around the SVG; an `<img>` does not know it, and uses TEXT instead"""

DISTINCT = len(COLOURS)
"""number of different colours"""
POINTS = 2048
"""points that all curves of a drawing have together, at most"""
NARROW = "fijlrt "
"""letters about half as wide as others"""
GAP, ROW = 20, 16
"""pixels between two charts; height of a line of the legend, and of a bar"""

LETTER, LINE = 6.4, 14
"""average width of a letter of a label, rounded up; height of a label"""
TITLE, LONGEST, WRAPPED = 24, 30, 31
"""letters that fit into a chart's title, a label, a line beside the plot"""
SIDE, MARGIN = 190, 26
"""pixels for the list beside the plot; for the half of the last number that is right of the axis"""
BESIDE = 6
"""names that are listed beside a plot, at most"""
BAND = 0.22
"""opacity of the band around a line"""
RADIUS = 4.5
AROUND = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
"""directions in which a label may stand from its point, the best first"""
FARTHEST = 9
TICKS = 5
NOTHING = 1e-12
"""an axis whose values are all below it goes from 0 to 1: it cannot be divided further"""

Words = Callable[[float], str]
Box = tuple[float, float, float, float]
"""left, top, right, bottom"""
Range = tuple[float, float]
Bucket = tuple[float, float, float, float]
"""x, low, high, middle"""

SCATTER, CHART = (740, 290), (250, 114)
"""width and height of the whole drawing, and of one chart in it"""


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


class Key(NamedTuple):
    """A name in a legend."""

    name: str
    fill: str
    """its colour; `none`: a word without one"""
    opacity: float = 1.0
    tone: str = TEXT
    """the colour of the words"""


Legend = Sequence[Key]
"""in one line"""


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


class Bar(NamedTuple):
    """A stacked bar."""

    name: str
    parts: Sequence[tuple[float, str]]
    """lengths and colours"""
    text: str
    """text behind it"""


class Bars(NamedTuple):
    title: str
    rows: Sequence[Bar]
    legend: Legend


class Dot(NamedTuple):
    """A point of a scatter plot."""

    x: float
    y: float
    label: str = ""
    best: bool = False
    group: str = ""
    """dots of one group are joined by a line, in their order"""
    spread: float = 0.0
    """how far off `y` may be: a bar up and down"""


class Axis(NamedTuple):
    title: str
    words: Words


class Picture:
    """An SVG that a notebook shows; `.svg` is its text."""

    def __init__(self, svg: str, text: str) -> None:
        self.svg, self._text = svg, text

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self._text


def image(svg: str, alt: str) -> str:
    """The drawing as an `<img>`: pages that do not trust a notebook take drawings out, and leave images."""
    data = base64.b64encode(svg.replace(INK, f"color:{TEXT}", 1).encode()).decode()
    return f'<img alt="{_escape(alt)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def colour(number: int) -> str:
    return COLOURS[number % DISTINCT]


def short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def step(value: float) -> str:
    return f"step {value:,.0f}"


def narrow(words: Words) -> Words:
    """The same words, short enough to stand beside an axis: 8.1e-5 for 8.07e-05."""

    def fitting(value: float) -> str:
        said = words(value)
        return said if len(said) <= 7 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")

    return fitting


def _svg(size: tuple[float, float], title: str, drawn: str, ink: str) -> str:
    """`ink`: the attributes that colour the text."""
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11" {ink}>'
        f"<title>{_escape(title)}</title>{drawn}</svg>"
    )


def _escape(text: str) -> str:
    """Text escaped for SVG. Control characters, such as a terminal's colours, would make the image invalid: they go."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def _at(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:.0f},{y:.0f})">{drawn}</g>'


class _Plot:
    """The area between two axes, and where in it a value lies."""

    def __init__(self, area: Box, xs: Range, ys: Range) -> None:
        self.left, self.top, self.right, self.foot = area
        self._xs, self._ys = xs, ys

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * _share(value, self._xs, 0.0)

    def y(self, value: float) -> float:
        return self.top + (self.foot - self.top) * (1 - _share(value, self._ys, 0.5))


def _share(value: float, span: Range, alone: float) -> float:
    """How far between the ends of `span`; `alone`: where they are equal."""
    low, high = span[0] / 2, span[1] / 2  # halves: the difference of the largest floats is infinite
    return (value / 2 - low) / (high - low) if high != low else alone


# ---------------------------------------------------------------- curves over a run


def draw_charts(charts: Sequence[Chart], columns: int, legends: Sequence[Legend] = (), bars: Bars | None = None) -> str:
    """Charts in a grid with `columns` columns, then the legends, one line each, then the bars."""
    columns = min(columns, len(charts)) or 1
    lines = max((len(chart.legend) for chart in charts), default=0)
    wide, high = CHART[0] + GAP, CHART[1] + lines * LINE + GAP
    points = max(24, POINTS // max(1, sum(len(chart.curves) for chart in charts)))
    drawn = "".join(
        _at(at % columns * wide, at // columns * high, _chart(one, points, lines)) for at, one in enumerate(charts)
    )
    width, height = columns * wide - GAP, -(-len(charts) // columns) * high
    for legend in legends:
        drawn += _at(0, height, _legend(legend))
        height += ROW
    if bars is not None:
        height += GAP // 2 if legends else 0
        if bars.rows:
            width = max(width, 2 * wide - GAP)
            drawn += _at(0, height, _bars(bars, width))
            height += (len(bars.rows) + 2) * ROW + 6
    told = ", ".join(" ".join([chart.title, *(key.name for key in chart.legend), chart.last]) for chart in charts)
    return _svg((width, height), told, drawn, f'fill="{TEXT}"')


def _chart(chart: Chart, points: int, lines: int) -> str:
    """`lines`: room for so many of a legend."""
    width, height = CHART[0], CHART[1] + lines * LINE
    few = [(number, curve.at_most(points)) for number, curve in chart.curves]
    buckets = [bucket for _, curve in few for part in _without_gaps(curve) for bucket in part]
    drawn = _title(short(chart.title, TITLE if chart.last else LONGEST))
    drawn += f'<text x="{width}" y="11" text-anchor="end">{_escape(chart.last)}</text>' if chart.last else ""
    drawn += "".join(_at(0, 15 + line * LINE, _legend([key])) for line, key in enumerate(chart.legend))
    bad = sorted({x for _, curve in few for x, bits in zip(curve.x, curve.bad, strict=True) if bits})
    if not buckets and not bad:
        return drawn
    first, end = min(curve.x[0] for _, curve in few if curve.x), max(curve.x[-1] for _, curve in few if curve.x)
    low, high = _heights(buckets, chart.zero)
    plot = _Plot((46, 24 + lines * LINE, width, height - 16), (first, end), (low, high))
    for value, y in ((high, plot.top), (low, plot.foot)):
        if value == high or high > low:
            drawn += (
                f'<path d="M{plot.left} {y:.1f}H{width}" stroke="{TEXT}" stroke-opacity=".25"/>'
                f'<text x="{plot.left - 5}" y="{y + 4:.1f}" text-anchor="end" font-size="10">'
                f"{_escape(chart.y(value))}</text>"
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


def _marks(xs: Sequence[float], word: str, plot: _Plot) -> str:
    """Where a value came that is not finite: no line can show it."""
    if not xs:
        return ""
    drawn = "".join(f'<path d="M{plot.x(x) - 4:.1f} {plot.top}h8l-4 6z" fill="{BAD}"/>' for x in xs)
    x, early = plot.x(xs[0]), plot.x(xs[0]) < (plot.left + plot.right) / 2
    where = f'x="{x + (6 if early else -6):.1f}" y="{plot.top + 15}" text-anchor="{"start" if early else "end"}"'
    return f'{drawn}<text {where} font-size="10" font-weight="600" fill="{BAD}">{_escape(word)}</text>'


def _title(text: str) -> str:
    return f'<text x="0" y="11" font-weight="600" font-size="12">{_escape(text)}</text>'


def _curve(curve: Curve, stroke: str, plot: _Plot) -> str:
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


def _bars(bars: Bars, width: float) -> str:
    left, drawn = 46, _title(bars.title)
    across = (width - left - 70) / max(sum(length for length, _ in bar.parts) for bar in bars.rows)
    for line, bar in enumerate(bars.rows):
        x, y = float(left), 18 + line * ROW
        drawn += f'<text x="{left - 5}" y="{y + 10}" text-anchor="end" font-size="10">{_escape(bar.name)}</text>'
        for length, fill in bar.parts:
            wide = length * across
            drawn += f'<rect x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="10" fill="{fill}"/>'
            x += wide
        drawn += f'<text x="{x + 5:.1f}" y="{y + 10}" font-size="10">{_escape(bar.text)}</text>'
    return drawn + _at(left, 22 + len(bars.rows) * ROW, _legend(bars.legend))


def _legend(names: Legend) -> str:
    drawn, x = "", 0
    for name, fill, opacity, tone in names:
        if fill != "none":
            drawn += f'<rect x="{x}" y="3" width="10" height="8" fill="{fill}" fill-opacity="{opacity}"/>'
            x += 14
        drawn += f'<text x="{x}" y="11" fill="{tone}">{_escape(name)}</text>'
        x += 14 + round(sum(3.5 if letter in NARROW else 6.5 for letter in name))
    return drawn


# ---------------------------------------------------------------- scatter plots


def scatter(dots: Sequence[Dot], x: Axis, y: Axis, beside: Sequence[tuple[str, str]] = ()) -> str:
    """A scatter plot; empty if there is nothing to draw. `beside`: names without a point, and why."""
    dots = [dot for dot in dots if all(map(math.isfinite, (dot.x, dot.y, dot.spread)))]
    if not dots:
        return ""
    (width, height), top = SCATTER, 26
    ends = [max(0.0, dot.y + off) for dot in dots for off in (-dot.spread, dot.spread)]
    xs, ys = (ticks(*_span(values)) for values in ([dot.x for dot in dots], ends))
    area = (58, top, width - (SIDE if beside else 0) - MARGIN, height - 40)
    plot = _Plot(area, (xs[0], xs[-1]), (ys[0], ys[-1]))
    drawn = _axes(plot, xs, ys, x, y) + _lines(dots, plot) + "".join(_dot(dot, plot, x, y) for dot in dots)
    drawn += _labels(dots, plot)
    if beside:
        drawn += _at(width - SIDE + 12, top, _list(beside))
    told = "; ".join(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}" for dot in dots if dot.label)
    return _svg(SCATTER, told, drawn, f'fill="currentColor" style="{INK}"')


def ticks(low: float, high: float, about: int = TICKS) -> list[float]:
    """Round numbers, the first at or below `low`, the last at or above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * round_ for round_ in (1, 2, 5, 10) if power * round_ >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: from zero unless that pushes all points to one side."""
    low, high = min(values), max(values)
    if high < NOTHING:
        return 0.0, 1.0
    if low == high:
        return 0.0, 1.2 * high
    if low < 0.5 * high:
        return 0.0, high
    room = max(high - low, 0.2 * high) - (high - low)  # so that a difference of one percent looks small
    return low - room / 2, high + room / 2


def _axes(plot: _Plot, xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis) -> str:
    drawn = f'<text x="0" y="11" font-weight="600">{_escape(y.title)}</text>'
    drawn += (
        f'<text x="{plot.right:.0f}" y="{SCATTER[1] - 6}" text-anchor="end" font-weight="600">{_escape(x.title)}</text>'
    )
    for value in ys:
        at, said = plot.y(value), _escape(y.words(value))
        drawn += (
            f'<path d="M{plot.left} {at:.1f}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{plot.left - 6}" y="{at + 4:.1f}" text-anchor="end" font-size="10">{said}</text>'
        )
    for value in xs:
        at, said = plot.x(value), _escape(x.words(value))
        drawn += (
            f'<path d="M{at:.1f} {plot.foot}v4" stroke="currentColor" stroke-opacity=".5"/>'
            f'<text x="{at:.1f}" y="{plot.foot + 15}" text-anchor="middle" font-size="10">{said}</text>'
        )
    return drawn + f'<path d="M{plot.left} {plot.foot}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".5"/>'


def _lines(dots: Sequence[Dot], plot: _Plot) -> str:
    drawn = ""
    for group in dict.fromkeys(dot.group for dot in dots if dot.group):
        line = " ".join(f"{plot.x(dot.x):.1f},{plot.y(dot.y):.1f}" for dot in dots if dot.group == group)
        drawn += f'<polyline points="{line}" fill="none" stroke="{PLAIN}" stroke-opacity=".4"/>'
    return drawn


def _dot(dot: Dot, plot: _Plot, x: Axis, y: Axis) -> str:
    at = f'cx="{plot.x(dot.x):.1f}" cy="{plot.y(dot.y):.1f}"'
    told = _escape(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}".removeprefix(": "))
    ring = f'<circle {at} r="{RADIUS + 3.5}" fill="none" stroke="{BOLD}" stroke-width="1.5"/>' if dot.best else ""
    fill = BOLD if dot.best else PLAIN
    radius = RADIUS if dot.label else RADIUS - 2
    if dot.spread:
        low, high = (plot.y(max(0.0, dot.y + off)) for off in (-dot.spread, dot.spread))
        bar = f'<path d="M{plot.x(dot.x):.1f} {low:.1f}V{high:.1f}" stroke="{fill}" stroke-width="1.5"/>'
        ring = bar + ring
    return f'{ring}<circle {at} r="{radius}" fill="{fill}"><title>{told}</title></circle>'


def _labels(dots: Sequence[Dot], plot: _Plot) -> str:
    """Labels beside their points, where they cover no other label or point; the best dot chooses first."""
    taken = [_around(plot.x(dot.x), plot.y(dot.y), RADIUS + (4 if dot.best else 0)) for dot in dots]
    drawn = ""
    for dot in sorted((dot for dot in dots if dot.label), key=lambda dot: not dot.best):
        label = short(dot.label, LONGEST)
        wide = LETTER * _letters(label) * (1.08 if dot.best else 1)
        found = next((place for place in _places(dot, plot, wide) if _free(place[0], taken, plot)), None)
        if found is None:
            continue  # too crowded: the point's tooltip and the table have the name
        box, away = found
        taken.append(box)
        x, y = plot.x(dot.x), plot.y(dot.y)
        if away:  # a line leads to its point
            to = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
            drawn += f'<path d="M{x:.1f} {y:.1f}L{to[0]:.1f} {to[1]:.1f}" stroke="currentColor" stroke-opacity=".45"/>'
        weight = f' font-weight="600" fill="{BOLD}"' if dot.best else ""
        drawn += f'<text x="{box[0]:.1f}" y="{box[3] - 3.5:.1f}"{weight}>{_escape(label)}</text>'
    return drawn


def _places(dot: Dot, plot: _Plot, wide: float) -> Iterable[tuple[Box, bool]]:
    """Boxes for a label, the nearest first, and whether it needs a line to its point."""
    x, y = plot.x(dot.x), plot.y(dot.y)
    near = RADIUS + (8 if dot.best else 4)
    for far in range(FARTHEST):
        gap = near + far * LINE
        for across, down in AROUND:
            left = x - wide / 2 if not across else x + gap if across > 0 else x - gap - wide
            middle = y + down * (gap + LINE / 2 if not across else gap)
            yield (left, middle - LINE / 2, left + wide, middle + LINE / 2), far > 0


def _free(box: Box, taken: Sequence[Box], plot: _Plot) -> bool:
    over = (box[0] < one[2] and one[0] < box[2] and box[1] < one[3] and one[1] < box[3] for one in taken)
    inside = box[0] >= plot.left + 2 and box[1] >= plot.top - LINE / 2
    return inside and box[2] <= plot.right + 10 and box[3] <= plot.foot - 1 and not any(over)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _list(names: Sequence[tuple[str, str]]) -> str:
    """Names without a point, each with its reason below it."""
    drawn, y = "", 10
    for name, why in names[:BESIDE]:
        drawn += f'<text y="{y}" font-weight="600" fill="{BAD}">{_escape(short(name, WRAPPED - 4))}</text>'
        lines = textwrap.wrap(why, WRAPPED, max_lines=2, placeholder=" …")
        for number, line in enumerate(lines, 1):
            drawn += f'<text y="{y + number * 13}" font-size="10">{_escape(line)}</text>'
        y += 13 * (len(lines) + 1) + 5
    if len(names) > BESIDE:
        drawn += f'<text y="{y}" font-size="10">and {len(names) - BESIDE} more</text>'
    return drawn


def _letters(text: str) -> float:
    """East Asian letters are twice as wide."""
    return sum(1.0 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
