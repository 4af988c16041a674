"""The run as HTML that is replaced twice a second, less often where drawing takes long, for front ends without widgets:
Kaggle, Databricks, older ones."""

from __future__ import annotations

from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import PAUSE, QUIET, CellOutput, Controls, Screen, ViewDelay
from nbtrain.watch.views.run_html import bundle


class HtmlView:
    """Shows one output and replaces it."""

    def __init__(self, feed: Feed, controls: Controls | None, screen: Screen, at_once: bool = False) -> None:
        self._feed = feed
        self._output = CellOutput(screen)
        self._waiting = ViewDelay(0.0 if at_once else QUIET, PAUSE)

    def opened(self, summary: str) -> None:
        self._output.begin(summary)

    def tick(self, now: float) -> None:
        self._output.tick(now)
        if self._waiting.over(now) and self._feed.figures.ranks:
            with self._waiting.drawing():
                self._output.show(bundle(self._feed, saved=False))

    def cleared(self) -> None:
        self._output.show_again()

    def closed(self, ok: bool) -> None:
        if self._output.shown:
            self._output.show(bundle(self._feed, saved=True))
        self._output.end()
