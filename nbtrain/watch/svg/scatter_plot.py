"""A scatter plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbtrain.watch.svg.axis_ticks import span, ticks
from nbtrain.watch.svg.base import INK, Plot, escaped, whole_svg
from nbtrain.watch.svg.dots import Axis, Dot, draw_dot
from nbtrain.watch.svg.labels import draw_labels

SIZE = (740, 290)
"""width and height"""
MARGIN = 26
"""pixels for the half of the last number that is right of the axis"""


def scatter(dots: Sequence[Dot], x: Axis, y: Axis) -> str:
    """A scatter plot; empty if there is nothing to draw."""
    dots = [dot for dot in dots if all(map(math.isfinite, (dot.x, dot.y, dot.spread)))]
    if not dots:
        return ""
    (width, height), top = SIZE, 26
    ends = [max(0.0, dot.y + off) for dot in dots for off in (-dot.spread, dot.spread)]
    xs, ys = (ticks(*span(values)) for values in ([dot.x for dot in dots], ends))
    area = (58, top, width - MARGIN, height - 40)
    plot = Plot(area, (xs[0], xs[-1]), (ys[0], ys[-1]))
    drawn = _axes(plot, xs, ys, x, y) + "".join(draw_dot(dot, plot, x, y) for dot in dots)
    drawn += draw_labels(dots, plot)
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
