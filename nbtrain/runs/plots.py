"""Draws curves of runs: with matplotlib where it is installed, else as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nbtrain import svg
from nbtrain.runs.courses import Course
from nbtrain.svg import Chart, Picture
from nbtrain.views.base import duration
from nbtrain.watch.series import Series

COLUMNS = 2
LEGEND = 4
"""names in a line of the legend"""


def draw(courses: Sequence[Course], ax: Any = None) -> Any:
    """matplotlib's axes, one or an array of them, as pandas returns them; without matplotlib a Picture."""
    try:
        from matplotlib import pyplot
    except ImportError:
        titles = ", ".join(course.title for course in courses)
        more = "an SVG, .svg is its text (pip install matplotlib, and it is matplotlib's axes)"
        return Picture(picture(courses), f"{titles}: {more}")
    if ax is None:
        columns = min(COLUMNS, len(courses))
        lines = math.ceil(len(courses) / columns)
        size = (6.4 * columns, 3.4 * lines)
        _, ax = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        for unused in ax.flat[len(courses) :]:
            unused.remove()
        ax = ax.flat[: len(courses)]
    every = list(getattr(ax, "flat", [ax]))
    for course, axes in zip(courses, every, strict=False):
        _plot(course, axes)
    return ax if len(every) > 1 else every[0]


def picture(courses: Sequence[Course]) -> str:
    names = list(dict.fromkeys(name for course in courses for name in course.curves))
    charts = []
    for course in courses:
        curves = [(names.index(name), _series(*points)) for name, points in course.curves.items()]
        across = svg.step if course.across == "step" else duration
        charts.append(
            Chart(course.title, course.words(curves[0][1].last), curves, svg.narrow(course.words), across, False)
        )
    legend = [(name, svg.colour(number)) for number, name in enumerate(names[: svg.DISTINCT])]
    if len(names) > svg.DISTINCT:
        legend.append((f"and {len(names) - svg.DISTINCT} more", "none"))
    legends = [legend[at : at + LEGEND] for at in range(0, len(legend), LEGEND)]
    return svg.draw_charts(charts, COLUMNS, legends if len(names) > 1 else [])


def _plot(course: Course, axes: Any) -> None:
    for name, (xs, ys) in course.curves.items():
        axes.plot(xs, ys, label=name, linewidth=1.3, marker="." if len(xs) == 1 else "")
    axes.set(title=course.title, xlabel=course.across)
    axes.yaxis.set_major_formatter(lambda y, _: course.words(y))
    axes.grid(alpha=0.25)
    if len(course.curves) > 1:
        axes.legend(fontsize="small")


def _series(xs: Sequence[float], ys: Sequence[float]) -> Series:
    series = Series()
    for x, y in zip(xs, ys, strict=True):
        series.add(x, y)
    return series
