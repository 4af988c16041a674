"""A run as HTML: while it goes on where there are no widgets, and what stays in the saved notebook everywhere.

Pages that show other people's notebooks remove style sheets, scripts and drawings, and some all style. So this is a
plain table, and the charts are an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean

from nbtrain.base.events import PHASES
from nbtrain.base.humanize import quantity, size, time
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.feed.run_statistics import Figures, RankFigures
from nbtrain.watch.svg.bars import Bar, Bars
from nbtrain.watch.svg.base import COLOURS, DISTINCT, PLAIN, image
from nbtrain.watch.svg.charts import draw_charts
from nbtrain.watch.svg.curves import BAND
from nbtrain.watch.svg.legend import Key, Legend
from nbtrain.watch.views.base import duration, place, words
from nbtrain.watch.views.picture_charts import picture_charts

ROWS = 16
"""ranks that are shown, at most; the others are counted"""
FULL = 0.92
"""share of its limit from which on memory is shown as short"""
NEAR = 0.25
"""share of its limit from which on memory is drawn as a part of it"""
COLUMNS = 3
"""charts in a row"""
LATELY = 8
"""points of a curve that are averaged, because a single step says little"""
OF_PHASE = dict(zip(PHASES, (COLOURS[at] for at in (4, 0, 3, 1, 2, 7)), strict=True))
NAMES = {phase: phase for phase in PHASES} | {"rest": "rest of the cell"}

FONT = "font:12px/1.5 var(--jp-ui-font-family,system-ui,sans-serif)"
INSET = "padding:0 var(--jp-code-padding,0)"
"""as far in as what a cell prints"""
LINE = "1px solid rgba(128,128,128,.35)"
CELL = "text-align:left;white-space:nowrap;padding:2px 14px 2px 0;border:0;background:none;max-width:none"
SOFT = "opacity:.7"
TONES = {"good": "#3d9b57", "bad": "#d5473c", "wait": "#ab8619"}


def bundle(feed: Feed, saved: bool) -> dict[str, str]:
    """`saved`: this stays in the notebook, and has to survive where only the simplest HTML is allowed."""
    figures = feed.figures
    return {
        "text/html": page(figures, saved, feed.run.get("summary", "")),
        "text/plain": " · ".join(filter(None, [figures.ending, *words(figures)])),
    }


def page(figures: Figures, saved: bool, summary: str = "") -> str:
    """`summary`: the run's first line."""
    drawn = picture(figures)
    if drawn and saved:
        drawn = image(drawn, "charts")
    charts = f'<div style="margin-top:8px;overflow-x:auto">{drawn}</div>' if drawn else ""
    return f'<div style="{FONT};{INSET};overflow-x:auto">{_head(figures, summary)}{_table(figures)}{charts}</div>'


def _head(figures: Figures, summary: str) -> str:
    rate = figures.samples_per_second
    tone = {"done": "wait" if figures.alerts else "good", "failed": "bad"}.get(figures.ending, "")
    parts = [
        f"<b>{_toned(figures.ending, tone)}</b>" if figures.ending else "",
        f"step {figures.lead.steps:,}" if figures.lead.steps else "",
        f"{quantity(rate)} samples/s{figures.over}" if rate else "",
        escape(place(figures.lead)),
        duration(figures.elapsed),
    ]
    lines = [escape(summary), " · ".join(filter(None, parts))]
    lines += [f"<b>{_toned(f'⚠ {said}', 'bad')}</b>" for said in figures.alerts]
    return "".join(f'<div style="margin-bottom:4px">{line}</div>' for line in lines if line)


def _table(figures: Figures) -> str:
    ranks = list(figures.ranks.values())
    computing = any(rank.share is not None for rank in ranks)
    devices = len({rank.device for rank in ranks}) > 1
    heads = ["rank", "device", "state", "step", "samples/s", "memory", "computing"]
    shown = [name for name in heads if (name != "device" or devices) and (name != "computing" or computing)]
    head = "".join(f'<th style="{CELL};font-weight:500;border-bottom:{LINE};{SOFT}">{name}</th>' for name in shown)
    rows = ""
    scale = _scale(ranks)
    for rank in ranks[:ROWS]:
        cells = _cells(rank, scale)
        rows += "".join(["<tr>", *(f'<td style="{CELL}">{cells[name]}</td>' for name in shown), "</tr>"])
    if len(ranks) > ROWS:
        rows += f'<tr><td colspan="{len(shown)}" style="{CELL}">and {len(ranks) - ROWS} more ranks</td></tr>'
    style = "border-collapse:collapse;color:inherit;font-size:12px;margin:0;border:0;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _cells(rank: RankFigures, scale: int | None) -> dict[str, str]:
    rate = rank.samples_per_second
    return {
        "rank": str(rank.rank),
        "device": escape(rank.device),
        "state": _toned(": ".join(filter(None, [rank.words, rank.note])), rank.tone),
        "step": f"{rank.steps:,}",
        "samples/s": "" if rate is None else quantity(rate),
        "memory": _memory(rank, scale),
        "computing": "" if rank.share is None else f"{100 * rank.share:.0f} % of its peak",
    }


def _toned(text: str, tone: str) -> str:
    return f'<span style="color:{TONES[tone]}">{escape(text)}</span>' if tone in TONES else escape(text)


def _scale(ranks: Sequence[RankFigures]) -> int | None:
    """What the whole bar of a rank's memory stands for: its limit (None), or the largest rank where all are far from
    that."""
    limits = [(rank.peak, rank.measured.limit) for rank in ranks if rank.measured is not None]
    near = any(limit and peak >= NEAR * limit for peak, limit in limits)
    return None if near else max((peak for peak, _ in limits), default=None)


def _memory(rank: RankFigures, scale: int | None) -> str:
    """A bar for the memory in use: the peak is a mark."""
    now = rank.measured
    if rank.memory is None or now is None:
        return ""
    text = size(rank.memory) + (f", peak {size(rank.peak)}" if size(rank.peak) != size(rank.memory) else "")
    retried = f" · {now.retries:,} allocation {'retry' if now.retries == 1 else 'retries'}" if now.retries else ""
    total = scale or now.limit
    if not total:
        return text + retried
    if not scale:
        text += f" of {size(now.limit)}"
    fill = TONES["bad"] if now.limit and rank.memory >= FULL * now.limit else "#3b8bd0"
    peak = f'<b style="{_inside(_percent(rank.peak, total), "2px")};margin-left:-2px"></b>'
    return (
        '<span style="position:relative;display:inline-block;width:90px;height:8px;border-radius:4px;overflow:hidden;'
        'vertical-align:middle;margin-right:8px;background:rgba(128,128,128,.25)">'
        f'<i style="{_inside("0", _percent(rank.memory, total))};background:{fill}"></i>'
        f"{peak if rank.peak > rank.memory else ''}</span>{text}{retried}"
    )


def _inside(left: str, width: str) -> str:
    return f"position:absolute;left:{left};top:0;bottom:0;width:{width};background:currentColor"


def _percent(part: float, total: float) -> str:
    return f"{100 * min(1.0, part / total):.1f}%"


def picture(figures: Figures) -> str:
    """The charts of a run as an SVG: its metrics, speed, memory, and what a step is made of; empty while there is
    nothing to draw."""
    charts = picture_charts(figures)
    bars = _bars(list(figures.ranks.items())[:DISTINCT])
    if not charts and not bars.rows:
        return ""
    return draw_charts(charts, COLUMNS, _legends(figures, bool(charts)), bars)


def _legends(figures: Figures, drawn: bool) -> list[Legend]:
    """What a line and its band are, where several ranks share them, and what is not there."""
    legends: list[Legend] = []
    if drawn and len(figures.ranks) > 1:
        band = Key("lowest to highest", PLAIN, BAND)
        legends.append([Key(f"mean of {len(figures.ranks)} ranks", PLAIN), band])
    if left_out := len(set().union(*(rank_figures.left_out for rank_figures in figures.ranks.values()))):
        legends.append([Key(f"{left_out} more metrics are in nbtrain.history()[-1].metrics", "none")])
    return legends


def _bars(ranks: Sequence[tuple[int, RankFigures]]) -> Bars:
    """What a step is made of on each rank."""
    spent = [(rank, phases) for rank, rank_figures in ranks if (phases := _phases(rank_figures))]
    rows = [
        Bar(
            f"rank {rank}",
            [(took, OF_PHASE[phase]) for phase, took in phases.items()],
            time(sum(phases.values()) / 1000),
        )
        for rank, phases in spent
    ]
    legend = [Key(NAMES[phase], OF_PHASE[phase]) for phase in PHASES if any(phases[phase] for _, phases in spent)]
    return Bars("recent step", rows, legend)


def _phases(rank_figures: RankFigures) -> dict[str, float]:
    """Milliseconds of a step in each phase, lately; empty where that is not known."""
    means = {}
    for phase in PHASES:
        series = rank_figures.curves.get(f"phases/{phase}")
        if series is None:
            return {}
        some = list(series.buckets())[-LATELY:]
        means[phase] = fmean(low / 2 + high / 2 for _, low, high in some) if some else 0.0
    return means if sum(means.values()) > 0 else {}
