"""The run as a live dashboard with buttons: when it appears, and what replaces it when it is over (a picture, which
needs no kernel). The widget is in dashboard_widget.py, and js/src/widget.js draws it."""

from __future__ import annotations

from typing import Any

from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import PAUSE, QUIET, CellOutput, Controls, Screen, ViewDelay, words

AGAIN = (0.5, 2.0, 6.0)
"""Pauses in seconds after which everything is sent again until the page has answered: what was sent before the page
was there is lost, and a busy kernel may not receive its request."""


class WidgetView:
    """Shows a widget, and after the run a picture of it."""

    def __init__(self, feed: Feed, controls: Controls | None, screen: Screen, at_once: bool = False) -> None:
        self._feed = feed
        self._controls = controls
        self._screen = screen
        self._output = CellOutput(screen)
        self._waiting = ViewDelay(0.0 if at_once else QUIET, AGAIN[0])
        self._widget: Any = None
        self._told = 0
        self._bundle: Any = None
        self._plain = False
        """the widget could not be made"""

    @property
    def comm_id(self) -> str:
        """The id of the widget's comm; empty before there is one."""
        comm = self._widget.comm if self._widget is not None else None
        return "" if comm is None else comm.comm_id

    def opened(self, summary: str) -> None:
        self._output.begin(summary)

    def tick(self, now: float) -> None:
        self._output.tick(now)
        if self._told > len(AGAIN) and not self._plain:
            return
        self._waiting.pause = PAUSE if self._plain else (*AGAIN, 0.0)[self._told]
        if not self._waiting.over(now) or not self._feed.figures.ranks:
            return
        self._told += 1
        if self._bundle is None:  # what stays is drawn by it, too: nothing is loaded when a run is stopped
            from nbtrain.watch.views.run_html import bundle

            self._bundle = bundle
        if self._plain:
            with self._waiting.drawing():
                self._output.show(self._bundle(self._feed, False))
        elif self._widget is None:
            self._appear()
        elif not self._widget.greeted:
            self._widget.start = self._feed.everything()

    def cleared(self) -> None:
        self._output.show_again()

    def closed(self, ok: bool) -> None:
        if self._output.shown:
            self._output.show(self._bundle(self._feed, True))
        self._output.end()
        if self._widget is not None:
            self._widget.rest()

    def _appear(self) -> None:
        try:
            from nbtrain.watch.views.dashboard_widget import DashboardWidget

            self._widget = DashboardWidget(self._feed, self._controls)
        except Exception as error:  # a package that does not fit must not end a training
            self._plain = True
            reason = f"{type(error).__name__}: {error}"
            self._screen.line(f"nbtrain: no widget ({reason}); plain HTML is shown instead")
            return
        shown, metadata = self._widget.bundle
        self._output.show({**shown, "text/plain": " · ".join(words(self._feed.figures))}, metadata)
