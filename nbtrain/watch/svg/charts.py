"""Charts in a grid, and below them legends and bars."""

from __future__ import annotations

from collections.abc import Sequence

from nbtrain.watch.svg.bars import ROW, Bars, draw_bars
from nbtrain.watch.svg.base import LINE, TEXT, moved, whole_svg
from nbtrain.watch.svg.curves import SIZE, Chart, draw_chart
from nbtrain.watch.svg.legend import Legend, draw_legend

POINTS = 2048
"""points that all curves of a drawing have together, at most"""
GAP = 20
"""pixels between two charts"""


def draw_charts(charts: Sequence[Chart], columns: int, legends: Sequence[Legend] = (), bars: Bars | None = None) -> str:
    """Charts in a grid with `columns` columns, then the legends, one line each, then the bars."""
    columns = min(columns, len(charts)) or 1
    lines = max((len(chart.legend) for chart in charts), default=0)
    wide, high = SIZE[0] + GAP, SIZE[1] + lines * LINE + GAP
    points = max(24, POINTS // max(1, sum(len(chart.curves) for chart in charts)))
    drawn = "".join(
        moved(at % columns * wide, at // columns * high, draw_chart(chart, points, lines))
        for at, chart in enumerate(charts)
    )
    width, height = columns * wide - GAP, -(-len(charts) // columns) * high
    for legend in legends:
        drawn += moved(0, height, draw_legend(legend))
        height += ROW
    if bars is not None:
        height += GAP // 2 if legends else 0
        if bars.rows:
            width = max(width, 2 * wide - GAP)
            drawn += moved(0, height, draw_bars(bars, width))
            height += (len(bars.rows) + 2) * ROW + 6
    told = ", ".join(" ".join([chart.title, *(key.name for key in chart.legend), chart.last]) for chart in charts)
    return whole_svg((width, height), told, drawn, f'fill="{TEXT}"')
