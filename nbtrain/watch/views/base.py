"""The interface of a view, what it may use, and the words that every view shows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import nbtrain.machine.host as host
from nbtrain.base.events import VALIDATION
from nbtrain.base.humanize import quantity, span
from nbtrain.watch.feed.run_statistics import Figures, RankFigures

WIDGET = "application/vnd.jupyter.widget-view+json"
FETCH = ("Colab", "VS Code")
"""environments that fetch a widget's front end in the version that they are told"""
BUNDLE = Path(__file__).parents[2] / "static" / "widget.js"
"""the front end, built from js/"""
SOON = 0.2
"""seconds after which a cell shows its first line, whatever it does"""
QUIET = 2.0
"""seconds: a shorter cell shows nothing more"""
PAUSE = 0.5
"""seconds between two updates"""
SHARE = 0.09
"""share of the time that drawing may take: the same thread watches the run, and many ranks have many curves"""
CURVES = 12
"""metrics in the line of words, at most"""


class View(Protocol):
    """Shows what a feed knows, above all that the cell prints. All calls come from the thread that watches the run,
    after the feed's."""

    def opened(self, summary: str) -> None:
        """The cell begins on the ranks; `summary` is the run's first line (`ddp · 4 ranks · cpu · batch 32 × 4 = 128`).
        An elastic run begins anew on other ranks."""

    def tick(self, now: float) -> None:
        """Called about ten times a second, from when the cell begins on the ranks."""

    def cleared(self) -> None:
        """The cell has cleared its output."""

    def closed(self, ok: bool) -> None:
        """The run ended."""


class Lines(Protocol):
    """Where a view of text alone shows itself."""

    def line(self, text: str) -> None: ...


class Screen(Lines, Protocol):
    """Where a view shows itself."""

    above: Callable[[], None] | None
    """shows what goes above all else; called once, when that comes"""

    def publish(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], transient: Mapping[str, Any], update: bool
    ) -> None: ...


class Controls(Protocol):
    """What the buttons of a view do."""

    def do(self, command: str) -> tuple[bool, str]:
        """`stop`, `stacks` or `kill`, from any thread: whether it is carried out, and a sentence."""

    def earlier(self) -> list[dict[str, Any]]:
        """Number and title of each run that this one may be compared with; called in a thread of its own."""

    def curves(self, run: int) -> dict[str, dict[str, Any]]:
        """Of each metric of that run its curve, as a feed has it; called in a thread of its own."""


class CellOutput:
    """One output of the cell: the run's first line, and then what takes its place whenever something is shown.

    It is there before the cell prints anything, so all prints stand together, below it. A cell that is over at once and
    shows nothing has a plain line, which costs a tenth of what an output does that something may take the place of."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._soon = ViewDelay(SOON, math.inf)
        self._id = ""
        self._last: tuple[Mapping[str, Any], Mapping[str, Any]] = {}, {}
        self._summary = ""
        self.shown = False
        """there is more than the first line"""

    def begin(self, summary: str) -> None:
        again, self._summary = bool(self._id), summary
        if again:
            self._screen.line(summary)
        else:
            self._screen.above = self._appear

    def tick(self, now: float) -> None:
        if self._screen.above is not None and self._soon.over(now):
            self._screen.above = None
            self._appear()

    def end(self) -> None:
        """The run is over; if nothing was shown but its first line, that is all of it."""
        if self._screen.above is not None:
            self._screen.above = None
            self._screen.line(self._summary)

    def _appear(self) -> None:
        self._publish({"text/plain": self._summary}, {})

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """In place of what was shown last; a page that shows text alone goes on with the run's first line."""
        self.shown, self._screen.above = True, None
        text = "\n".join(filter(None, [self._summary, data["text/plain"]]))
        self._publish({**data, "text/plain": text}, metadata or {})

    def show_again(self) -> None:
        """The cell has cleared its output, and this with it."""
        if self._id:
            self._id = ""
            self._publish(*self._last)

    def _publish(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self._last = data, metadata
        update = bool(self._id)
        if not update:
            self._id = os.urandom(16).hex()
        self._screen.publish(data, metadata, {"display_id": self._id}, update)


def own_version(widget: Any) -> dict[str, str]:
    """The anywidget version to tell front ends that fetch it. A Jupyter server has its own, which may differ."""
    if host.environment() not in FETCH:
        return {}
    from nbtrain.compat.kernel import MODEL_VERSION, VIEW_VERSION  # imports IPython, which reading history must not

    own = widget.class_traits()[MODEL_VERSION].default_value
    return {MODEL_VERSION: own, VIEW_VERSION: own}


def widget_bundle(model_id: str) -> dict[str, Any]:
    """The mimebundle that shows a widget, without a text for pages that cannot."""
    return {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": model_id}}


class ViewDelay:
    """Says when a view is due: not in the first seconds of the cell, then after every pause. Pauses are longer where it
    takes long to draw."""

    def __init__(self, first: float, pause: float) -> None:
        self.pause = pause
        self._next = first
        self._began: float | None = None

    def over(self, now: float) -> bool:
        if self._began is None:
            self._began = now
        if now - self._began < self._next:
            return False
        self._next = now - self._began + self.pause
        return True

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around what is drawn when it is due."""
        began = monotonic()
        yield
        self._next += max(0.0, (monotonic() - began) / SHARE - self.pause)


def words(figures: Figures) -> list[str]:
    """The run in a few words for each thing that is known."""
    from nbtrain.watch.feed.across_ranks import latest

    lead, ranks = figures.lead, figures.ranks
    said = [duration(figures.elapsed)]
    if lead.steps:
        said.append(f"step {lead.steps:,}")
    rates = (lead.steps_per_second, "steps/s"), (figures.samples_per_second, "samples/s")
    if known := " · ".join(f"{quantity(rate)} {unit}" for rate, unit in rates if rate):
        said.append(known + figures.over)
    if memory := [figures_of.memory for figures_of in ranks.values() if figures_of.memory is not None]:
        said.append(f"memory {span(memory)}{' per rank' * (len(memory) > 1)}")
    said += [f"{name} {metric(latest(curves).value)}" for name, curves in list(figures.metrics.items())[:CURVES]]
    if lead.progress is not None:
        said.append(place(lead))
    said += figures.alerts
    said += [
        f"rank {rank}: {figures_of.words} {figures_of.note}".rstrip()
        for rank, figures_of in ranks.items()
        if figures_of.tone == "bad"
    ]
    return said


def place(figures: RankFigures) -> str:
    """`epoch 2 · 340/1200 · 28 % · 0:42 left`; where it is known how many there will be, of all of them:
    `epoch 2 of 8 · 340/1200 · 16 % · 4:10 left`; while a training evaluates, with what it has trained:
    `epoch 2 of 8 · validation 3/40 · 25 %`"""
    progress, share = figures.progress, figures.training.share
    if progress is None:
        return ""
    words = []
    if progress.stage in ("", VALIDATION):
        of = f" of {progress.epochs}" if progress.epochs is not None else ""
        words.append(f"epoch {progress.epoch + 1}{of}")  # people count from one
    stage = f"{progress.stage} " if progress.stage else ""
    words.append(f"{stage}{progress.done}/{progress.total}" if progress.total else f"{stage}batch {progress.done}")
    if share is not None:
        words.append(f"{math.floor(100 * share + 1e-9)} %")
        if share < 1 and figures.left is not None:
            words.append(f"{duration(figures.left)} left")
    return " · ".join(words)


def duration(seconds: float) -> str:
    """0:42, 12:03, 1:02:03"""
    minutes, rest = divmod(math.ceil(seconds - 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def metric(value: float) -> str:
    return f"{value:.4g}"
