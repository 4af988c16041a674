"""Stacked bars, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbtrain.watch.svg.base import draw_title, escaped, moved
from nbtrain.watch.svg.legend import Legend, draw_legend

ROW = 16
"""height of a bar, and of a line of a legend below the charts, in pixels"""


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


def draw_bars(bars: Bars, width: float) -> str:
    left, drawn = 46, draw_title(bars.title)
    across = (width - left - 70) / max(sum(length for length, _ in bar.parts) for bar in bars.rows)
    for line, bar in enumerate(bars.rows):
        x, y = float(left), 18 + line * ROW
        drawn += f'<text x="{left - 5}" y="{y + 10}" text-anchor="end" font-size="10">{escaped(bar.name)}</text>'
        for length, fill in bar.parts:
            wide = length * across
            drawn += f'<rect x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="10" fill="{fill}"/>'
            x += wide
        drawn += f'<text x="{x + 5:.1f}" y="{y + 10}" font-size="10">{escaped(bar.text)}</text>'
    return drawn + moved(left, 22 + len(bars.rows) * ROW, draw_legend(bars.legend))
