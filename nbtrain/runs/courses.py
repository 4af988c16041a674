"""Curves over a run, read from its record: of a metric, speed, memory, or the phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbtrain.events import PHASES
from nbtrain.humanize import quantity, size
from nbtrain.runs.read_run_file import RunRecord
from nbtrain.runs.run_rows import COLUMNS, METRICS
from nbtrain.views.base import metric
from nbtrain.watch.figures import Rate

MEASURED = ("throughput", "memory", "phases")
"""what can be plotted besides metrics"""

Points = tuple[list[float], list[float]]


@dataclass(frozen=True, slots=True)
class Course:
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


def course(record: RunRecord, name: str) -> Course | None:
    """A metric, or one of MEASURED; None if there is nothing of it."""
    found = _metric(record, name)
    if not found.curves and name in MEASURED:
        found = {"throughput": _speed, "memory": _memory, "phases": _phases}[name](record)
    return found if found.curves else None


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


def _metric(record: RunRecord, name: str) -> Course:
    points: dict[int, Points] = {}
    for rank, its, rows in record.rows(METRICS):
        if its == name:
            xs, ys = points.setdefault(rank, ([], []))
            xs += [row[0] or 0 for row in rows]
            ys += [row[1] or 0.0 for row in rows]
    return Course(name, "step", _named(points), metric)


def _speed(record: RunRecord) -> Course:
    rows = throughput(record)
    unit = "samples" if any(row["samples"] for row in rows) else "steps"
    return Course(f"{unit}/s", "seconds", _by_rank((row, row[f"{unit}_per_second"]) for row in rows), quantity)


def _memory(record: RunRecord) -> Course:
    # where torch holds nothing on a device, the process is what counts
    rows = record.table("memory")
    return Course("memory", "seconds", _by_rank((row, row["reserved"] or row["process"]) for row in rows), size)


def _phases(record: RunRecord) -> Course:
    """Milliseconds of a step in each phase."""
    found: dict[str, Points] = {}
    rows = record.table("phases")
    mine = [row for row in rows if row["rank"] == rows[0]["rank"]]
    for before, now in pairwise(mine):
        if steps := now["steps"] - before["steps"]:
            for phase in PHASES:
                xs, ys = found.setdefault(phase, ([], []))
                xs.append(now["seconds"])
                ys.append(1000 * (now[phase] - before[phase]) / steps)
    return Course("a step, ms", "seconds", found, quantity)


def _by_rank(rows: Iterable[tuple[dict[str, Any], float | None]]) -> dict[str, Points]:
    points: dict[int, Points] = {}
    for row, y in rows:
        if y is not None:
            xs, ys = points.setdefault(row["rank"], ([], []))
            xs.append(row["seconds"])
            ys.append(y)
    return _named(points)


def _named(points: Mapping[int, Points]) -> dict[str, Points]:
    return {f"rank {rank}": points[rank] for rank in sorted(points)}
