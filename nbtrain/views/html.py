"""The run as a small table that updates itself, for front ends without widgets; what stays in the saved notebook.

Plain HTML, CSS and SVG: no script, so that it looks the same in JupyterLab, Colab, VS Code, Kaggle and nbconvert.
Colours are the page's own (`currentColor`, JupyterLab's variables), so that it sits in light and dark alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from nbtrain.events import Event
from nbtrain.views.base import CURVES, QUIET, Curve, Figures, RankFigures, duration, metric, place, quantity
from nbtrain.words import size

Bundle = Mapping[str, str]
Publish = Callable[[Bundle, bool], object]
"""takes a mimebundle, and whether it replaces the one before"""

PAUSE = 0.5
"""seconds between updates"""
ROWS = 16
"""so many ranks are shown; the rest is counted"""

WIDTH, HEIGHT = 120, 26

STYLE = """<style>
.nbt{font:12px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);
 display:inline-block;min-width:min(540px,100%);max-width:100%;overflow-x:auto}
.nbt .nbt-head{display:flex;gap:.75em;align-items:baseline;justify-content:space-between;margin:0 0 4px}
.nbt .nbt-soft{opacity:.65}
.nbt table{border-collapse:collapse;width:100%;margin:0;border:0;font-variant-numeric:tabular-nums;table-layout:auto}
.nbt tr{background:none!important;border:0}
.nbt th,.nbt td{padding:3px 10px 3px 0!important;border:0!important;text-align:left!important;white-space:nowrap;
 background:none!important;color:inherit;font-size:12px;vertical-align:middle}
.nbt th{font-weight:500;opacity:.65}
.nbt thead tr{border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))!important}
.nbt .nbt-n{text-align:right!important}
.nbt .nbt-bar{position:relative;display:inline-block;width:90px;height:8px;border-radius:4px;overflow:hidden;
 vertical-align:middle;margin-right:8px;background:rgba(128,128,128,.25)}
.nbt .nbt-bar i{position:absolute;left:0;top:0;bottom:0;background:var(--jp-brand-color1,#1976d2);border-radius:4px}
.nbt .nbt-bar b{position:absolute;top:0;bottom:0;width:2px;background:currentColor;opacity:.7}
.nbt .nbt-failed{color:var(--jp-error-color1,#d32f2f)}
.nbt .nbt-done{color:var(--jp-success-color1,#388e3c)}
.nbt .nbt-curves{display:flex;flex-wrap:wrap;gap:4px 20px;margin-top:6px}
.nbt .nbt-curves>span{display:inline-flex;align-items:center;gap:6px}
.nbt svg{display:block;color:var(--jp-brand-color1,#1976d2);overflow:visible}
</style>"""


class HtmlView:
    """A Sink that shows one output and replaces it, at most twice a second."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._figures = Figures()
        self._summary = ""
        self._shown = False
        self._next = QUIET

    def opened(self, summary: str) -> None:
        self._summary = summary

    def receive(self, event: Event) -> None:
        self._figures.receive(event)

    def tick(self, now: float) -> None:
        elapsed = self._figures.tick(now)
        if elapsed < self._next or not self._figures.ranks:
            return
        self._next = elapsed + PAUSE
        self._show("")

    def closed(self, ok: bool) -> None:
        self._figures.close()
        if self._shown:
            self._show("done" if ok else "ended early")

    def _show(self, ending: str) -> None:
        words = " · ".join(filter(None, [ending, *self._figures.words()]))
        bundle = {
            "text/html": page(self._figures, self._summary, ending),
            "text/plain": "\n".join(filter(None, [self._summary, words])),
        }
        self._publish(bundle, self._shown)
        self._shown = True


def notebook_display() -> Publish:
    """Publishes through IPython's `display`; imported here, because views are loaded where there is no IPython."""
    from IPython.display import display

    handle: Any = None

    def publish(bundle: Bundle, replace: bool) -> None:
        nonlocal handle
        if replace and handle is not None:
            handle.update(dict(bundle), raw=True)
        else:
            handle = display(dict(bundle), raw=True, display_id=True)

    return publish


def page(figures: Figures, summary: str, ending: str) -> str:
    """The whole output. `ending`: how the run ended, empty while it goes on."""
    rate = figures.samples_per_second
    total = f"{quantity(rate)} samples/s" if rate and len(figures.ranks) > 1 else ""
    right = " · ".join(filter(None, [ending, total, duration(figures.elapsed)]))
    title = f"<span>{escape(summary)}</span>" if summary else ""
    return (
        f'{STYLE}<div class="nbt"><div class="nbt-head">{title}'
        f'<span class="nbt-soft">{escape(right)}</span></div>{_table(figures)}{_curves(figures.curves)}</div>'
    )


def _table(figures: Figures) -> str:
    ranks = list(figures.ranks.items())
    scale = max((rank.peak for _, rank in ranks), default=0)
    rows = "".join(_row(number, rank, scale) for number, rank in ranks[:ROWS])
    if len(ranks) > ROWS:
        rows += f'<tr><td colspan="6" class="nbt-soft">and {len(ranks) - ROWS} more ranks</td></tr>'
    head = (
        '<th>rank</th><th>state</th><th class="nbt-n">step</th><th class="nbt-n">samples/s</th>'
        "<th>memory, peak</th><th>progress</th>"
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(number: int, rank: RankFigures, scale: int) -> str:
    state = escape(f"{rank.state} {rank.note}".strip())
    tone = f' class="nbt-{rank.state}"' if rank.state in ("failed", "done") else ""
    rate = rank.samples_per_second
    return (
        f"<tr><td>{number}</td><td{tone}>{state}</td>"
        f'<td class="nbt-n">{rank.steps:,}</td>'
        f'<td class="nbt-n">{"" if rate is None else quantity(rate)}</td>'
        f"<td>{_memory(rank, scale)}</td><td>{_progress(rank)}</td></tr>"
    )


def _memory(rank: RankFigures, scale: int) -> str:
    if rank.memory is None or not scale:
        return ""
    peak = f'<b style="left:calc({_percent(rank.peak, scale)} - 2px)"></b>' if rank.peak > rank.memory else ""
    text = size(rank.memory) + (f", {size(rank.peak)}" if rank.peak > rank.memory else "")
    return f"{_bar(_percent(rank.memory, scale), peak)}{text}"


def _progress(rank: RankFigures) -> str:
    if rank.progress is None:
        return ""
    done, total = rank.progress.done, rank.progress.total
    return (_bar(_percent(done, total)) if total else "") + escape(place(rank))


def _bar(width: str, mark: str = "") -> str:
    return f'<span class="nbt-bar"><i style="width:{width}"></i>{mark}</span>'


def _percent(part: float, whole: float) -> str:
    return f"{100 * min(1.0, part / whole):.1f}%"


def _curves(curves: Mapping[str, Curve]) -> str:
    if not curves:
        return ""
    shown = "".join(
        f"<span>{escape(name)} <strong>{metric(curve.last)}</strong>{sparkline(curve)}</span>"
        for name, curve in list(curves.items())[:CURVES]
    )
    more = f'<span class="nbt-soft">and {len(curves) - CURVES} more</span>' if len(curves) > CURVES else ""
    return f'<div class="nbt-curves">{shown}{more}</div>'


def sparkline(curve: Curve) -> str:
    """The course of a metric as one line, from its lowest to its highest value; empty below two points."""
    points = curve.points
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across = WIDTH / ((last - first) or 1)
    span = high / 2 - low / 2  # halves: the difference of the largest floats is infinite
    up = [(y / 2 - low / 2) / span if span else 0.5 for _, y in points]
    line = " ".join(
        f"{(x - first) * across:.1f},{1 + (HEIGHT - 2) * (1 - y):.1f}" for (x, _), y in zip(points, up, strict=True)
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>steps {first}–{last}: {metric(low)} to {metric(high)}</title>"
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
