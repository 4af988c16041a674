"""The run as lines of text every few seconds: for terminals, nbconvert, papermill and logs."""

from __future__ import annotations

from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import QUIET, Controls, Lines, ViewDelay, words

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 5.0, 30.0, 1.25
"""seconds between lines: few at first, while people watch; more later, when they read the log"""


class TextView:
    """Writes lines of text."""

    def __init__(self, feed: Feed, controls: Controls | None, screen: Lines, at_once: bool = False) -> None:
        self._figures = feed.figures
        self._screen = screen
        self._shown = False
        self._waiting = ViewDelay(QUIET, FIRST_PAUSE)

    def opened(self, summary: str) -> None:
        self._line(summary)

    def tick(self, now: float) -> None:
        if not self._figures.ranks or not self._waiting.over(now):  # a turn with nothing to say is not used up
            return
        self._waiting.pause = min(LONGEST_PAUSE, self._waiting.pause * GROWTH)
        self._shown = True
        self._line(" · ".join(words(self._figures)))

    def cleared(self) -> None:
        pass

    def closed(self, ok: bool) -> None:
        if self._shown:
            self._line(" · ".join([self._figures.ending, *words(self._figures)]))

    def _line(self, text: str) -> None:
        self._screen.line(" ".join(text.split()))  # a metric's name may hold line ends
