"""A scatter plot as one SVG image: no script, no style sheet, the colours of the page it stands on."""

from __future__ import annotations

import base64
import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

BOLD, PLAIN, BAD = "#dd6b33", "#3b8bd0", "#d5473c"
INK = "color:var(--jp-ui-font-color1,currentColor)"
ALONE = "color:#767676"
"""an image knows nothing of the page around it: read on light and on dark ground"""

WIDTH, HEIGHT, SIDE, MARGIN = 740, 290, 190, 26
"""SIDE: what stands beside the plot has so much; MARGIN: half of a number below the end of the axis"""
LEFT, TOP, BOTTOM = 58, 26, 40
LETTER, LINE = 6.4, 14
"""of a label, at the most on average; its height"""
LONGEST, WRAPPED = 30, 31
"""letters of a label; of a line beside the plot"""
BESIDE = 6
"""so many are listed beside it"""
RADIUS = 4.5
AROUND = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
"""where a label may stand from its point, the best first"""
FARTHEST = 9
TICKS = 5
NOTHING = 1e-12
"""What is less than that can be divided no further."""

Words = Callable[[float], str]
Box = tuple[float, float, float, float]


class Dot(NamedTuple):
    x: float
    y: float
    label: str = ""
    best: bool = False
    group: str = ""
    """those of one group are joined, in their order"""


class Axis(NamedTuple):
    title: str
    words: Words


def scatter(dots: Sequence[Dot], x: Axis, y: Axis, beside: Sequence[tuple[str, str]] = ()) -> str:
    """Empty where there is nothing to draw. `beside`: names that have no point, and why."""
    dots = [dot for dot in dots if math.isfinite(dot.x) and math.isfinite(dot.y)]
    if not dots:
        return ""
    plot = _Plot(dots, WIDTH - (SIDE if beside else 0) - MARGIN)
    drawn = _axes(plot, x, y) + _joined(dots, plot) + "".join(_dot(dot, plot, x, y) for dot in dots)
    drawn += _labels(dots, plot)
    if beside:
        drawn += f'<g transform="translate({WIDTH - SIDE + 12},{TOP})">{_beside(beside)}</g>'
    told = "; ".join(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}" for dot in dots if dot.label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11" fill="currentColor" style="{INK}">'
        f"<title>{_said(told)}</title>{drawn}</svg>"
    )


def image(svg: str, alt: str) -> str:
    """The same as an image, which every page shows: those that do not trust a notebook take drawings out."""
    data = base64.b64encode(svg.replace(INK, ALONE, 1).encode()).decode()
    return f'<img alt="{_said(alt)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def ticks(low: float, high: float, about: int = TICKS) -> list[float]:
    """Round numbers, the first at or below `low`, the last at or above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * round_ for round_ in (1, 2, 5, 10) if power * round_ >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What an axis spans: from zero where that does not push all points to one side."""
    low, high = min(values), max(values)
    if high < NOTHING:
        return 0.0, 1.0
    if low == high:
        return 0.0, 1.2 * high
    if low < 0.5 * high:
        return 0.0, high
    room = max(high - low, 0.2 * high) - (high - low)  # a difference of one percent is to look like one
    return low - room / 2, high + room / 2


class _Plot:
    """Where a value lies."""

    def __init__(self, dots: Sequence[Dot], right: float) -> None:
        self.right, self.foot = right, HEIGHT - BOTTOM
        self.xs, self.ys = (ticks(*_range(values)) for values in ([dot.x for dot in dots], [dot.y for dot in dots]))

    def x(self, value: float) -> float:
        return LEFT + (self.right - LEFT) * (value - self.xs[0]) / (self.xs[-1] - self.xs[0])

    def y(self, value: float) -> float:
        return self.foot - (self.foot - TOP) * (value - self.ys[0]) / (self.ys[-1] - self.ys[0])

    def holds(self, box: Box) -> bool:
        return box[0] >= LEFT + 2 and box[1] >= TOP - LINE / 2 and box[2] <= self.right + 10 and box[3] <= self.foot - 1


def _axes(plot: _Plot, x: Axis, y: Axis) -> str:
    drawn = f'<text x="0" y="11" font-weight="600">{_said(y.title)}</text>'
    drawn += f'<text x="{plot.right:.0f}" y="{HEIGHT - 6}" text-anchor="end" font-weight="600">{_said(x.title)}</text>'
    for value in plot.ys:
        at = plot.y(value)
        drawn += (
            f'<path d="M{LEFT} {at:.1f}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" font-size="10">{_said(y.words(value))}</text>'
        )
    for value in plot.xs:
        at, said = plot.x(value), _said(x.words(value))
        drawn += (
            f'<path d="M{at:.1f} {plot.foot}v4" stroke="currentColor" stroke-opacity=".5"/>'
            f'<text x="{at:.1f}" y="{plot.foot + 15}" text-anchor="middle" font-size="10">{said}</text>'
        )
    return drawn + f'<path d="M{LEFT} {plot.foot}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".5"/>'


def _joined(dots: Sequence[Dot], plot: _Plot) -> str:
    drawn = ""
    for group in dict.fromkeys(dot.group for dot in dots if dot.group):
        line = " ".join(f"{plot.x(dot.x):.1f},{plot.y(dot.y):.1f}" for dot in dots if dot.group == group)
        drawn += f'<polyline points="{line}" fill="none" stroke="{PLAIN}" stroke-opacity=".4"/>'
    return drawn


def _dot(dot: Dot, plot: _Plot, x: Axis, y: Axis) -> str:
    at = f'cx="{plot.x(dot.x):.1f}" cy="{plot.y(dot.y):.1f}"'
    told = _said(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}".removeprefix(": "))
    ring = f'<circle {at} r="{RADIUS + 3.5}" fill="none" stroke="{BOLD}" stroke-width="1.5"/>' if dot.best else ""
    fill = BOLD if dot.best else PLAIN
    radius = RADIUS if dot.label else RADIUS - 2
    return f'{ring}<circle {at} r="{radius}" fill="{fill}"><title>{told}</title></circle>'


def _labels(dots: Sequence[Dot], plot: _Plot) -> str:
    """Each beside its point, where it covers no other label and no point; the best has the first choice."""
    taken = [_around(plot.x(dot.x), plot.y(dot.y), RADIUS + (4 if dot.best else 0)) for dot in dots]
    drawn = ""
    for dot in sorted((dot for dot in dots if dot.label), key=lambda dot: not dot.best):
        label = short(dot.label, LONGEST)
        wide = LETTER * _letters(label) * (1.08 if dot.best else 1)
        found = next((place for place in _places(dot, plot, wide) if _free(place[0], taken, plot)), None)
        if found is None:
            continue  # so crowded a plot says it when the point is pointed at, and in its table
        box, away = found
        taken.append(box)
        x, y = plot.x(dot.x), plot.y(dot.y)
        if away:  # a line leads to its point
            to = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
            drawn += f'<path d="M{x:.1f} {y:.1f}L{to[0]:.1f} {to[1]:.1f}" stroke="currentColor" stroke-opacity=".45"/>'
        weight = f' font-weight="600" fill="{BOLD}"' if dot.best else ""
        drawn += f'<text x="{box[0]:.1f}" y="{box[3] - 3.5:.1f}"{weight}>{_said(label)}</text>'
    return drawn


def _places(dot: Dot, plot: _Plot, wide: float) -> Iterable[tuple[Box, bool]]:
    """Boxes for a label, the nearest first, and whether it stands away from its point."""
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
    return plot.holds(box) and not any(over)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _beside(names: Sequence[tuple[str, str]]) -> str:
    """Names that have no point, each with its reason below it."""
    drawn, y = "", 10
    for name, why in names[:BESIDE]:
        drawn += f'<text y="{y}" font-weight="600" fill="{BAD}">{_said(short(name, WRAPPED - 4))}</text>'
        lines = textwrap.wrap(why, WRAPPED, max_lines=2, placeholder=" …")
        for number, line in enumerate(lines, 1):
            drawn += f'<text y="{y + number * 13}" font-size="10">{_said(line)}</text>'
        y += 13 * (len(lines) + 1) + 5
    if len(names) > BESIDE:
        drawn += f'<text y="{y}" font-size="10">and {len(names) - BESIDE} more</text>'
    return drawn


def _said(text: str) -> str:
    """Escaped; without what would make the image unreadable as a whole, such as colours of a terminal."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _letters(text: str) -> float:
    """East Asian letters are twice as wide."""
    return sum(1.0 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
