"""Courses of runs as a picture: matplotlib's where that is installed, else an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nbtrain.runs.courses import Course
from nbtrain.views.base import duration
from nbtrain.views.picture import Chart, narrow, past
from nbtrain.watch.series import Series


class Picture:
    """An SVG that a notebook shows; `.svg` is its text."""

    def __init__(self, courses: Sequence[Course]) -> None:
        self.svg = svg(courses)
        self._titles = ", ".join(course.title for course in courses)

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"{self._titles}: an SVG, .svg is its text (pip install matplotlib, and it is matplotlib's axes)"


def draw(courses: Sequence[Course], ax: Any = None) -> Any:
    """matplotlib's axes, one or an array of them, as pandas gives them back; without matplotlib a Picture."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return Picture(courses)
    if ax is None:
        columns = min(2, len(courses))
        lines = math.ceil(len(courses) / columns)
        size = (6.4 * columns, 3.4 * lines)
        _, ax = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        for spare in ax.flat[len(courses) :]:
            spare.remove()
        ax = ax.flat[: len(courses)]
    every = list(getattr(ax, "flat", [ax]))
    for course, axes in zip(courses, every, strict=False):
        _plot(course, axes)
    return ax if len(every) > 1 else every[0]


def svg(courses: Sequence[Course]) -> str:
    names = list(dict.fromkeys(name for course in courses for name in course.curves))
    charts = []
    for course in courses:
        curves = [(names.index(name), _series(*points)) for name, points in course.curves.items()]
        across = _step if course.across == "step" else duration
        charts.append(Chart(course.title, course.words(curves[0][1].last), curves, _brief(course.words), across, False))
    return past(charts, names)


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


def _brief(words: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: narrow(words(value), value)


def _step(value: float) -> str:
    return f"step {value:,.0f}"
