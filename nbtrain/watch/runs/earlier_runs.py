"""The runs that the dashboard can lay over the one that it shows: those of the same notebook that logged something."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from nbtrain.watch.feed.across_ranks import AcrossRanks, latest
from nbtrain.watch.feed.series import Series, number, value
from nbtrain.watch.runs.history import numbered_run, runs_from_newest
from nbtrain.watch.runs.run import Run
from nbtrain.watch.views.base import metric

OFFERED = 20
"""the last runs"""
POINTS = 512
"""of a curve, at most"""
NAMED = 2
"""metrics in the title of a run"""


def earlier_runs() -> list[dict[str, Any]]:
    """Number and title of each, the oldest first."""
    logged = (run for run in runs_from_newest() if run.how != "running" and run.figures["last"])
    return [{"number": run.number, "title": _title(run)} for run in islice(logged, OFFERED)][::-1]


def mean_curves(wanted: int) -> dict[str, dict[str, Any]]:
    """Of each metric of a run the mean over its ranks, as a curve of a feed; empty if there is no such run here."""
    by_name: dict[str, dict[int, Series]] = {}
    run = numbered_run(wanted)
    for rank, name, rows in run.logged_rows() if run is not None else ():
        points = [(step or 0, math.nan if y is None else y) for step, y in rows]
        by_name.setdefault(name, {}).setdefault(rank, Series()).extend(points)
    return {name: _curve(ranks) for name, ranks in by_name.items()}


def _title(run: Run) -> str:
    last = ", ".join(f"{name} {metric(y)}" for name, y in list(run.figures["last"].items())[:NAMED])
    return f"run {run.number} · {run.settings['strategy']} · {last} · {run.began:%H:%M}"


def _curve(ranks: Mapping[int, Series]) -> dict[str, Any]:
    mean, now = AcrossRanks(list(ranks.values())).at_most(POINTS), latest(ranks)
    y = [number(one) for one in mean.middle]
    bad = {"bad": list(mean.bad)} if any(mean.bad) else {}
    return {"x": list(mean.x), "low": y, "high": y, "last": value(now.value), "count": len(y), "width": 1, **bad}
