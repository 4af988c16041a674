"""A scatter plot, with a list of names beside it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from nbtrain.watch.svg.axis_ticks import span, ticks
from nbtrain.watch.svg.base import BAD, INK, Plot, escaped, moved, short, whole_svg
from nbtrain.watch.svg.dots import Axis, Dot, draw_dot
from nbtrain.watch.svg.labels import draw_labels

SIZE = (740, 290)
"""width and height"""
SIDE, MARGIN = 190, 26
"""pixels for the list beside the plot; for the half of the last number that is right of the axis"""
BESIDE = 6
"""names that are listed beside a plot, at most"""
WRAPPED = 31
"""letters that fit into a line there"""


def scatter(dots: Sequence[Dot], x: Axis, y: Axis, beside: Sequence[tuple[str, str]] = ()) -> str:
    """A scatter plot; empty if there is nothing to draw. `beside`: names without a point, and why."""
    dots = [dot for dot in dots if all(map(math.isfinite, (dot.x, dot.y, dot.spread)))]
    if not dots:
        return ""
    (width, height), top = SIZE, 26
    ends = [max(0.0, dot.y + off) for dot in dots for off in (-dot.spread, dot.spread)]
    xs, ys = (ticks(*span(values)) for values in ([dot.x for dot in dots], ends))
    area = (58, top, width - (SIDE if beside else 0) - MARGIN, height - 40)
    plot = Plot(area, (xs[0], xs[-1]), (ys[0], ys[-1]))
    drawn = _axes(plot, xs, ys, x, y) + "".join(draw_dot(dot, plot, x, y) for dot in dots)
    drawn += draw_labels(dots, plot)
    if beside:
        drawn += moved(width - SIDE + 12, top, _list(beside))
    told = "; ".join(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}" for dot in dots)
    return whole_svg(SIZE, told, drawn, f'fill="currentColor" style="{INK}"')


def _axes(plot: Plot, xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis) -> str:
    drawn = f'<text x="0" y="11" font-weight="600">{escaped(y.title)}</text>'
    drawn += (
        f'<text x="{plot.right:.0f}" y="{SIZE[1] - 6}" text-anchor="end" font-weight="600">{escaped(x.title)}</text>'
    )
    for value in ys:
        at, said = plot.y(value), escaped(y.words(value))
        drawn += (
            f'<path d="M{plot.left} {at:.1f}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{plot.left - 6}" y="{at + 4:.1f}" text-anchor="end" font-size="10">{said}</text>'
        )
    for value in xs:
        at, said = plot.x(value), escaped(x.words(value))
        drawn += (
            f'<path d="M{at:.1f} {plot.foot}v4" stroke="currentColor" stroke-opacity=".5"/>'
            f'<text x="{at:.1f}" y="{plot.foot + 15}" text-anchor="middle" font-size="10">{said}</text>'
        )
    return drawn + f'<path d="M{plot.left} {plot.foot}H{plot.right:.0f}" stroke="currentColor" stroke-opacity=".5"/>'


def _list(names: Sequence[tuple[str, str]]) -> str:
    """Names without a point, each with its reason below it."""
    drawn, y = "", 10
    for name, why in names[:BESIDE]:
        drawn += f'<text y="{y}" font-weight="600" fill="{BAD}">{escaped(short(name, WRAPPED - 4))}</text>'
        lines = textwrap.wrap(why, WRAPPED, max_lines=2, placeholder=" …")
        for number, line in enumerate(lines, 1):
            drawn += f'<text y="{y + number * 13}" font-size="10">{escaped(line)}</text>'
        y += 13 * (len(lines) + 1) + 5
    if len(names) > BESIDE:
        drawn += f'<text y="{y}" font-size="10">and {len(names) - BESIDE} more</text>'
    return drawn
