"""Which charts the picture of a run has, and what their legends say: the same as in the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

from nbtrain.base.humanize import quantity, size
from nbtrain.watch.feed.across_ranks import AcrossRanks, latest
from nbtrain.watch.feed.metric_charts import Part, metric_charts
from nbtrain.watch.feed.run_statistics import Figures
from nbtrain.watch.feed.series import Series, bits_of, not_finite
from nbtrain.watch.svg.base import BAD, TEXT, Words, colour, narrow, short, step
from nbtrain.watch.svg.curves import Chart
from nbtrain.watch.svg.legend import Key
from nbtrain.watch.views.base import duration, metric

LETTERS = 48
"""letters of a line of a legend"""
LISTED = 4
"""ranks that are named; of more it is said how many they are"""

Curves = Mapping[int, Series]
"""rank → its curve"""


def picture_charts(figures: Figures) -> list[Chart]:
    """Metrics, then speed and memory over time. Where several ranks have a curve: its mean, in a band."""
    when = "last" if figures.ending else "now"
    ranks = figures.ranks.items()
    metrics = figures.metrics
    charts = []
    for title, parts in metric_charts(list(metrics)):
        curves = [(part, metrics[part.name]) for part in parts]
        charts.append(_chart(title, curves, metric, when, narrow("{:.3g}".format), step))
    for title, name, words in (
        ("samples/s" + " of each rank" * (len(ranks) > 1), "speed/samples", quantity),
        ("memory", "memory/used", size),
        ("FLOP/s", "compute/tflops", _operations),
    ):
        measured = {rank: rank_figures.curves[name] for rank, rank_figures in ranks if name in rank_figures.curves}
        if any(len(series) > 1 for series in measured.values()):
            charts.append(_chart(title, [(Part(name, ""), measured)], words, when, words, duration, zero=True))
    return charts


def _chart(
    title: str, parts: Sequence[tuple[Part, Curves]], words: Words, when: str, y: Words, x: Words, zero: bool = False
) -> Chart:
    """`words` are of its legend, `y` and `x` of its axes."""
    drawn = [(number, AcrossRanks(list(curves.values()))) for number, (_, curves) in enumerate(parts)]
    legend = []
    for number, (part, curves) in enumerate(parts):
        text, bad = _legend(part, curves, words, when)
        fill = colour(number) if len(parts) > 1 else "none"
        legend.append(Key(short(text, LETTERS), fill, tone=BAD if bad else TEXT))
    broken = not_finite(_broken(series for _, curves in parts for series in curves.values()))
    return Chart(title, "", drawn, y, x, zero, legend, broken)


def _legend(part: Part, curves: Curves, words: Words, when: str) -> tuple[str, bool]:
    """`last 0.7 (0.66–0.83 across ranks)` or, shorter, `train 0.7 (0.66–0.83)`; whether something was not finite."""
    now, begins = latest(curves), part.label or when
    spread = _spread(now.mean, now.finite, words, "" if part.label else " across ranks") if now.finite else ""
    if now.broken:
        came = not_finite(bits_of(next(iter(now.broken.values()))))
        rest = f", else {words(now.mean) if part.label else spread}" if spread else ""
        return f"{begins} {came}{_which(list(now.broken), now.ranks)}{rest}", True
    ever = _broken(curves.values())
    return f"{begins} {spread}" + (f" · there was {not_finite(ever)}" if ever else ""), bool(ever)


def _spread(mean: float, values: Sequence[float], words: Words, over: str) -> str:
    low, high = words(min(values)), words(max(values))
    return words(mean) if low == high else f"{words(mean)} ({low}–{high}{over})"


def _which(broken: Sequence[int], ranks: int) -> str:
    if ranks == 1:
        return ""
    if len(broken) == ranks:
        return " on all ranks"
    several = "ranks" if len(broken) > 1 else "rank"
    return f" on {len(broken)} ranks" if len(broken) > LISTED else f" on {several} {', '.join(map(str, broken))}"


def _broken(curves: Iterable[Series]) -> int:
    """Which values were not finite, as bits."""
    return reduce(or_, (bits for series in curves for bits in series.bad), 0)


def _operations(tera: float) -> str:
    """31.2 T, 540 G"""
    for unit, scale in (("T", 1.0), ("G", 1e-3), ("M", 1e-6)):
        if tera >= scale:
            return f"{quantity(tera / scale)} {unit}"
    return quantity(1e12 * tera)
