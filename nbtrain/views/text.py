"""The run as lines of text every few seconds: for terminals, nbconvert, papermill and logs."""

from __future__ import annotations

from collections.abc import Callable

from nbtrain.events import Event
from nbtrain.views.base import QUIET, Figures

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 5.0, 30.0, 1.25
"""seconds between lines: often at first, when people look; rarely later, when they read the log"""


class TextView:
    """A Sink that writes lines; `write` takes text with its line end, as a file's does."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._figures = Figures()
        self._summary = ""
        self._shown = False
        self._pause = FIRST_PAUSE
        self._next = QUIET

    def opened(self, summary: str) -> None:
        self._summary = summary

    def receive(self, event: Event) -> None:
        self._figures.receive(event)

    def tick(self, now: float) -> None:
        elapsed = self._figures.tick(now)
        if elapsed < self._next or not self._figures.ranks:
            return
        if not self._shown and self._summary:
            self._line(self._summary)
        self._shown = True
        self._line(" · ".join(self._figures.words()))
        self._next = elapsed + self._pause
        self._pause = min(LONGEST_PAUSE, self._pause * GROWTH)

    def closed(self, ok: bool) -> None:
        self._figures.close()
        if self._shown:
            self._line(" · ".join(["done" if ok else "ended early", *self._figures.words()]))

    def _line(self, text: str) -> None:
        self._write(" ".join(text.split()) + "\n")  # a metric's name may hold line ends
