"""A run as HTML: while it goes on where there are no widgets, and what stays in the saved notebook everywhere.

A page that shows other people's notebooks takes out style sheets, scripts and drawings, and some take out what is said
about style at all. So it is a plain table, and the charts are an image.
"""

from __future__ import annotations

import base64
from html import escape

from nbtrain.views.base import duration, place, words
from nbtrain.views.picture import RANKS, colour, picture
from nbtrain.watch.figures import Figures, RankFigures
from nbtrain.words import quantity, size

ROWS = 16
"""so many ranks are shown; the rest is counted"""
FULL = 0.92
"""of its limit: from here on memory is short"""

FONT = "font:12px/1.5 var(--jp-ui-font-family,system-ui,sans-serif)"
LINE = "1px solid rgba(128,128,128,.35)"
CELL = "text-align:left;white-space:nowrap;padding:2px 14px 2px 0;border:0;background:none;max-width:none"
SOFT = "opacity:.7"
TONES = {"good": "#3d9b57", "bad": "#d5473c", "wait": "#ab8619"}


def bundle(figures: Figures, saved: bool) -> dict[str, str]:
    """`saved`: this is what stays, also where only the simplest HTML is let through."""
    return {
        "text/html": page(figures, saved),
        "text/plain": " · ".join(filter(None, [figures.ending, *words(figures)])),
    }


def page(figures: Figures, saved: bool) -> str:
    drawn = picture(figures)
    if drawn and saved:
        data = base64.b64encode(drawn.encode()).decode()
        drawn = f'<img alt="charts" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'
    charts = f'<div style="margin-top:8px;overflow-x:auto">{drawn}</div>' if drawn else ""
    return f'<div style="{FONT};overflow-x:auto">{_head(figures)}{_table(figures)}{charts}</div>'


def _head(figures: Figures) -> str:
    rate = figures.samples_per_second
    tone = {"done": "good", "failed": "bad"}.get(figures.ending, "")
    found = [
        _toned(figures.ending, tone),
        f"step {figures.lead.steps:,}" if figures.lead.steps else "",
        f"{quantity(rate)} samples/s" if rate else "",
        escape(place(figures.lead)),
        duration(figures.elapsed),
    ]
    return f'<div style="margin-bottom:4px">{" · ".join(filter(None, found))}</div>'


def _table(figures: Figures) -> str:
    ranks = list(figures.ranks.values())
    computing = any(rank.share is not None for rank in ranks)
    devices = len({rank.device for rank in ranks}) > 1
    heads = ["rank", "device", "state", "step", "samples/s", "memory", "computing"]
    shown = [name for name in heads if (name != "device" or devices) and (name != "computing" or computing)]
    head = "".join(f'<th style="{CELL};font-weight:500;border-bottom:{LINE};{SOFT}">{name}</th>' for name in shown)
    rows = ""
    for rank in ranks[:ROWS]:
        cells = _cells(rank, len(ranks) > 1)
        rows += "".join(["<tr>", *(f'<td style="{CELL}">{cells[name]}</td>' for name in shown), "</tr>"])
    if len(ranks) > ROWS:
        rows += f'<tr><td colspan="{len(shown)}" style="{CELL}">and {len(ranks) - ROWS} more ranks</td></tr>'
    style = "border-collapse:collapse;color:inherit;font-size:12px;margin:0;border:0;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _cells(rank: RankFigures, several: bool) -> dict[str, str]:
    rate = rank.samples_per_second
    drawn = several and rank.rank < RANKS
    return {
        "rank": (f'<span style="color:{colour(rank.rank)}">■</span> ' if drawn else "") + str(rank.rank),
        "device": escape(rank.device),
        "state": _toned(": ".join(filter(None, [rank.words, rank.note])), rank.tone),
        "step": f"{rank.steps:,}",
        "samples/s": "" if rate is None else quantity(rate),
        "memory": _memory(rank),
        "computing": "" if rank.share is None else f"{100 * rank.share:.0f} % of its peak",
    }


def _toned(text: str, tone: str) -> str:
    return f'<span style="color:{TONES[tone]}">{escape(text)}</span>' if tone in TONES else escape(text)


def _memory(rank: RankFigures) -> str:
    """Now, the peak as a mark, and the limit as the whole bar."""
    now = rank.measured
    if rank.memory is None or now is None:
        return ""
    text = size(rank.memory) + (f", peak {size(rank.peak)}" if size(rank.peak) != size(rank.memory) else "")
    retried = f" · had to make room {now.retries:,} ×" if now.retries else ""
    if not now.limit:
        return text + retried
    fill = TONES["bad"] if rank.memory >= FULL * now.limit else "#3b8bd0"
    peak = f'<b style="{_inside(_percent(rank.peak, now.limit), "2px")};margin-left:-2px"></b>'
    return (
        '<span style="position:relative;display:inline-block;width:90px;height:8px;border-radius:4px;overflow:hidden;'
        'vertical-align:middle;margin-right:8px;background:rgba(128,128,128,.25)">'
        f'<i style="{_inside("0", _percent(rank.memory, now.limit))};background:{fill}"></i>'
        f"{peak if rank.peak > rank.memory else ''}</span>{text} of {size(now.limit)}{retried}"
    )


def _inside(left: str, width: str) -> str:
    return f"position:absolute;left:{left};top:0;bottom:0;width:{width};background:currentColor"


def _percent(part: float, whole: float) -> str:
    return f"{100 * min(1.0, part / whole):.1f}%"
