"""Curves over a run: of a metric, speed, memory, or the phases of a step.

They are read from the record, and drawn with matplotlib where it is installed, else as an SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbtrain.base.events import PHASES
from nbtrain.base.humanize import quantity, size
from nbtrain.watch.feed.series import Series
from nbtrain.watch.feed.training_progress import Rate
from nbtrain.watch.runs.read_run_file import RunRecord
from nbtrain.watch.runs.run_rows import COLUMNS, METRICS
from nbtrain.watch.svg.base import DISTINCT, Picture, colour, narrow, step
from nbtrain.watch.svg.charts import draw_charts
from nbtrain.watch.svg.curves import Chart
from nbtrain.watch.svg.legend import Key
from nbtrain.watch.views.base import duration, metric

MEASURED = ("throughput", "memory", "phases")
"""what can be plotted besides metrics"""
CHARTS = 2
"""charts in a row"""
LEGEND = 4
"""names in a line of the legend"""

Points = tuple[list[float], list[float]]


@dataclass(frozen=True, slots=True)
class RunCurves:
    title: str
    across: str
    """the x axis: step, or seconds"""
    curves: Mapping[str, Points]
    """`rank 0` and so on, the lowest first; or phases, of the lowest rank"""
    words: Callable[[float], str]
    """formats y"""


def logged(record: RunRecord) -> list[str]:
    """The names of metrics, in the order in which they came."""
    return list(dict.fromkeys(name for _, name, _ in record.rows(METRICS)))


def read_curves(record: RunRecord, name: str) -> RunCurves | None:
    """A metric, or one of MEASURED; None if there is nothing of it."""
    curves = _metric(record, name)
    if not curves.curves and name in MEASURED:
        curves = {"throughput": _speed, "memory": _memory, "phases": _phases}[name](record)
    return curves if curves.curves else None


def columns(kind: str) -> tuple[str, ...]:
    """The columns of this kind of rows."""
    rates = ("steps_per_second", "samples_per_second") if kind == "throughput" else ()
    return "rank", *(("step",) if kind == METRICS else COLUMNS[kind]), *rates


def throughput(record: RunRecord) -> list[dict[str, Any]]:
    """Its throughput rows, with rates of the last seconds."""
    rates: dict[int, tuple[Rate, Rate]] = {}
    found = []
    for row in record.table("throughput"):
        steps, samples = rates.setdefault(row["rank"], (Rate(), Rate()))
        steps.add(row["running"], row["steps"])
        samples.add(row["running"], row["samples"])
        found.append({**row, "steps_per_second": steps.value, "samples_per_second": samples.value})
    return found


def _metric(record: RunRecord, name: str) -> RunCurves:
    points = (
        (rank, step or 0, value or 0.0)
        for rank, its, rows in record.rows(METRICS)
        if its == name
        for step, value in rows
    )
    return RunCurves(name, "step", _of_ranks(points), metric)


def _speed(record: RunRecord) -> RunCurves:
    rows = throughput(record)
    unit = "samples" if any(row["samples"] for row in rows) else "steps"
    points = ((row["rank"], row["seconds"], row[f"{unit}_per_second"]) for row in rows)
    return RunCurves(f"{unit}/s", "seconds", _of_ranks(points), quantity)


def _memory(record: RunRecord) -> RunCurves:
    # where torch holds nothing on a device, the process is what counts
    rows = record.table("memory")
    points = ((row["rank"], row["seconds"], row["reserved"] or row["process"]) for row in rows)
    return RunCurves("memory", "seconds", _of_ranks(points), size)


def _phases(record: RunRecord) -> RunCurves:
    """Milliseconds of a step in each phase."""
    rows = record.table("phases")
    mine = [row for row in rows if row["rank"] == rows[0]["rank"]]
    points = (
        (phase, now["seconds"], 1000 * (now[phase] - before[phase]) / steps)
        for before, now in pairwise(mine)
        if (steps := now["steps"] - before["steps"])
        for phase in PHASES
    )
    return RunCurves("a step, ms", "seconds", _gathered(points), quantity)


def _of_ranks(points: Iterable[tuple[int, float, float | None]]) -> dict[str, Points]:
    by_rank = _gathered(points)
    return {f"rank {rank}": by_rank[rank] for rank in sorted(by_rank)}


def _gathered(points: Iterable[tuple[Any, float, float | None]]) -> dict[Any, Points]:
    """A curve for each key, of its (x, y)."""
    points_of: dict[Any, Points] = {}
    for key, x, y in points:
        if y is not None:
            xs, ys = points_of.setdefault(key, ([], []))
            xs.append(x)
            ys.append(y)
    return points_of


# ---------------------------------------------------------------- drawing


def draw(several: Sequence[RunCurves], ax: Any = None) -> Any:
    """matplotlib's axes, one or an array of them, as pandas returns them; without matplotlib a Picture."""
    try:
        from matplotlib import pyplot
    except ImportError:
        titles = ", ".join(curves.title for curves in several)
        more = "an SVG, .svg is its text (pip install matplotlib, and it is matplotlib's axes)"
        return Picture(picture(several), f"{titles}: {more}")
    if ax is None:
        wide = min(CHARTS, len(several))
        high = math.ceil(len(several) / wide)
        _, ax = pyplot.subplots(high, wide, figsize=(6.4 * wide, 3.4 * high), squeeze=False, layout="constrained")
        for unused in ax.flat[len(several) :]:
            unused.remove()
        ax = ax.flat[: len(several)]
    every = list(getattr(ax, "flat", [ax]))
    for curves, axes in zip(several, every, strict=False):
        _plot(curves, axes)
    return ax if len(every) > 1 else every[0]


def picture(several: Sequence[RunCurves]) -> str:
    names = list(dict.fromkeys(name for curves_of in several for name in curves_of.curves))
    charts = []
    for curves_of in several:
        curves = [(names.index(name), _series(*points)) for name, points in curves_of.curves.items()]
        across = step if curves_of.across == "step" else duration
        charts.append(
            Chart(curves_of.title, curves_of.words(curves[0][1].last), curves, narrow(curves_of.words), across, False)
        )
    legend = [Key(name, colour(number)) for number, name in enumerate(names[:DISTINCT])]
    if len(names) > DISTINCT:
        legend.append(Key(f"and {len(names) - DISTINCT} more", "none"))
    legends = [legend[at : at + LEGEND] for at in range(0, len(legend), LEGEND)]
    return draw_charts(charts, CHARTS, legends if len(names) > 1 else [])


def _plot(run_curves: RunCurves, axes: Any) -> None:
    for name, (xs, ys) in run_curves.curves.items():
        axes.plot(xs, ys, label=name, linewidth=1.3, marker="." if len(xs) == 1 else "")
    axes.set(title=run_curves.title, xlabel=run_curves.across)
    axes.yaxis.set_major_formatter(lambda y, _: run_curves.words(y))
    axes.grid(alpha=0.25)
    if len(run_curves.curves) > 1:
        axes.legend(fontsize="small")


def _series(xs: Sequence[float], ys: Sequence[float]) -> Series:
    series = Series()
    for x, y in zip(xs, ys, strict=True):
        series.add(x, y)
    return series
