"""Shows what ranks print and display: whose output, and lines that differ. Where it appears: screens.py."""

from __future__ import annotations

import html
import importlib
import os
import sys
from collections.abc import Callable, Iterable

import nbtrain.base.humanize as humanize
from nbtrain.base.events import Display, Output, Widgets
from nbtrain.notebook.output.rank_widgets import RankWidgets
from nbtrain.notebook.output.screens import CellScreen

KEPT = 1 << 16
"""Characters kept of each rank's text, to be compared when the cell ends."""
SHOWN = 200
"""Lines of other ranks' text that are shown."""
NAMED = 8
"""Other ranks that are named."""
FOLDER = "nbtrain-output"


class Relay:
    """The output of one run.

    `rank0`: the lead's is shown as it comes; lines that other ranks print differently are folded in below.
    `all`: every line of every rank, with its rank in front. `files`: every rank's text goes to a file.
    """

    def __init__(self, screen: CellScreen, mode: str, lead: int, ranks: Iterable[int], widgets: RankWidgets) -> None:
        self.screen = screen
        self._widgets = widgets
        self._mode = mode
        self._lead = lead
        self._texts: dict[int, str] = dict.fromkeys(ranks, "")
        self._open_lines: dict[tuple[int, str], str] = {}
        self.cleared: Callable[[], object] = lambda: None
        """called when the cell has cleared its output"""
        self._clears = False
        """it will have with what it shows next, as `clear_output(wait=True)` has it"""
        self._files: set[int] = set()
        """ranks whose file belongs to this run already"""
        self._unwritten = False
        """a file could not be written, which was said"""

    def text(self, event: Output) -> None:
        rank = event.rank
        self._texts[rank] = (self._texts.get(rank, "") + event.text)[-KEPT:]
        if self._mode == "all" and len(self._texts) > 1:
            self._with_rank(rank, event.stream, event.text)
            return
        if rank == self._lead:
            self._clear_now()
            self.screen.write(event.stream, event.text)
            self.screen.flush(event.stream)
        if self._mode == "files":
            self._to_file(rank, event.text)

    def display(self, event: Display) -> None:
        if not self._shows(event.rank):
            return
        if event.data is None:
            self._clears = True
            if not event.wait:
                self._clear_now()
            return
        self._clear_now()
        if self._mode == "all" and len(self._texts) > 1:
            self.say(f"[rank {event.rank}]")
        self.screen.publish(self._widgets.shown(event.data), event.metadata, event.transient, event.update)

    def _clear_now(self) -> None:
        """What is shown at once takes the place of what was there: nothing flickers."""
        if self._clears:
            self._clears = False
            self.screen.clear(True)
            self.cleared()

    def widgets(self, event: Widgets) -> None:
        if self._shows(event.rank) and self.screen.shows:
            self._widgets.take(event.messages)

    def _shows(self, rank: int) -> bool:
        """Whether what this rank displays is shown."""
        return rank == self._lead or self._mode == "all"

    def say(self, text: str) -> None:
        """Show a sentence of nbtrain's own."""
        self.screen.line(text)

    def close(self, ok: bool) -> None:
        """`ok`: the cell was not cut short."""
        if self._widgets.moved:
            self._widgets.end(ok)
        for (rank, stream), text in self._open_lines.items():
            if text:
                self.screen.write(stream, f"[rank {rank}] {text}\n")
        if self._mode == "rank0" and any(self._texts.values()):
            self._fold()
        if self._files and len(self._texts) > 1:
            self.say(f"the output of every rank is in {FOLDER}/rank0.txt … rank{max(self._texts)}.txt")

    def tail(self, rank: int, lines: int = 5) -> str:
        """The last lines that a rank printed."""
        return "\n".join(self._texts.get(rank, "").splitlines()[-lines:])

    def _with_rank(self, rank: int, stream: str, text: str) -> None:
        text = self._open_lines.pop((rank, stream), "") + text
        *lines, rest = text.split("\n")
        for line in lines:
            self.screen.write(stream, f"[rank {rank}] {line}\n")
        if "\r" in rest:  # a progress bar: only its last state is a line
            rest = rest.rsplit("\r", 1)[1] if not rest.endswith("\r") else rest
        self._open_lines[rank, stream] = rest

    def _to_file(self, rank: int, text: str) -> None:
        path = os.path.join(FOLDER, f"rank{rank}.txt")
        try:
            os.makedirs(FOLDER, exist_ok=True)
            mode = "a" if rank in self._files else "w"
            with open(path, mode, encoding="utf-8") as file:
                self._files.add(rank)
                file.write(text)
        except OSError as error:  # of a training that goes on
            if not self._unwritten:
                self._unwritten = True
                self.say(f"nbtrain: {path}: {error.strerror or error}; output is missing there, and the cell goes on")

    def _fold(self) -> None:
        """Show in one place, closed at first, what other ranks have printed and the lead has not."""
        said = set(_lines(self._texts.get(self._lead, "")))
        others: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted(self._texts):
            lines = tuple(line for line in _lines(self._texts[rank]) if line not in said)
            if rank != self._lead and lines:
                others.setdefault(lines, []).append(rank)
        if not others:
            return
        several = len(others) > 1
        each = max(1, SHOWN // len(others))
        shown = [
            f"[{humanize.ranks(ranks)}] {line}" if several else line
            for lines, ranks in others.items()
            for line in lines[-each:]
        ]
        count = sum(map(len, others))
        found = sorted(rank for ranks in others.values() for rank in ranks)
        who = humanize.ranks(found) if len(found) <= NAMED else f"{len(found)} other ranks"
        title = f"{who} printed something different ({count:,} line{'s' * (count > 1)})"
        folded = f"<details><summary>{title}</summary><pre>{html.escape(chr(10).join(shown))}</pre></details>"
        plain = f"{title}: {shown[0]}" + (" …" if count > 1 else "")
        self.screen.publish({"text/html": folded, "text/plain": plain})


def figures_can_be_shown() -> None:
    """Load matplotlib's inline backend, so that a figure that came home is drawn although none was made here."""
    inline = "matplotlib_inline.backend_inline"
    if "matplotlib.figure" in sys.modules and inline in os.environ.get("MPLBACKEND", ""):
        importlib.import_module(inline)


def _lines(text: str) -> list[str]:
    """Lines that are not progress bars: those, overwritten by a carriage return, always differ."""
    lines = [line.rstrip("\r") for line in text.split("\n")]  # terminals, which `!cmd` runs in, end lines with both
    return [line for line in lines if line.strip() and "\r" not in line]
