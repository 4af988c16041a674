"""The points of a scatter plot."""

from __future__ import annotations

from typing import NamedTuple

from nbtrain.watch.svg.base import BOLD, PLAIN, Plot, Words, escaped

RADIUS = 4.5


class Dot(NamedTuple):
    """A point of a scatter plot."""

    x: float
    y: float
    label: str
    best: bool = False
    spread: float = 0.0
    """how far off `y` may be: a bar up and down"""


class Axis(NamedTuple):
    title: str
    words: Words


def draw_dot(dot: Dot, plot: Plot, x: Axis, y: Axis) -> str:
    at = f'cx="{plot.x(dot.x):.1f}" cy="{plot.y(dot.y):.1f}"'
    told = escaped(f"{dot.label}: {x.words(dot.x)}, {y.words(dot.y)} {y.title}")
    ring = f'<circle {at} r="{RADIUS + 3.5}" fill="none" stroke="{BOLD}" stroke-width="1.5"/>' if dot.best else ""
    fill = BOLD if dot.best else PLAIN
    if dot.spread:
        low, high = (plot.y(max(0.0, dot.y + off)) for off in (-dot.spread, dot.spread))
        bar = f'<path d="M{plot.x(dot.x):.1f} {low:.1f}V{high:.1f}" stroke="{fill}" stroke-width="1.5"/>'
        ring = bar + ring
    return f'{ring}<circle {at} r="{RADIUS}" fill="{fill}"><title>{told}</title></circle>'
