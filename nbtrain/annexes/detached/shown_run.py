"""A detached run as its own cell would show it: from what its keeper notes of it, once a second."""

from __future__ import annotations

import time
from typing import Any

from nbtrain.annexes.detached import keeper_client
from nbtrain.annexes.detached.run_folders import RunFolder
from nbtrain.annexes.detached.runs_table import NotedFeed
from nbtrain.notebook.output.blocked_kernel import BlockedKernel
from nbtrain.notebook.output.screens import CellScreen
from nbtrain.watch.runs.earlier_runs import earlier_runs, mean_curves
from nbtrain.watch.views import choose
from nbtrain.watch.views.base import QUIET, View


class ShownRun:
    """Shows it below the cell that attaches, until that is left. Is a `Controls` for its buttons."""

    def __init__(self, shell: Any, folder: RunFolder, screen: CellScreen) -> None:
        self._shell, self._folder, self._screen = shell, folder, screen
        self._noted = NotedFeed(folder)
        self._view: View | None = None
        self._kernel = BlockedKernel(shell, lambda comm: bool(comm) and getattr(self._view, "comm_id", None) == comm)

    def look(self) -> None:
        self._kernel.answer()
        feed = self._noted.feed
        if not self._noted.read() or not feed.run["summary"]:
            return
        if self._view is None:
            monitor = str(self._folder.about.get("monitor", "auto"))
            if monitor != "off" and getattr(self._shell, "kernel", None) is None:
                monitor = "text"
            self._view = choose(monitor, self._shell, feed, self, self._screen, at_once=True)
            self._view.opened(feed.run["summary"])
            if feed.ended is not None and monitor != "off" and feed.figures.elapsed > QUIET:
                from nbtrain.watch.views.run_html import bundle

                self._screen.publish(bundle(feed, saved=True))
        if feed.ended is None:
            feed.tick(now := time.monotonic())
            self._view.tick(now)

    def close(self) -> None:
        self._noted.read(last=True)
        if self._view is not None:
            self._view.closed((self._noted.feed.ended or {}).get("how") == "done")

    # -- its buttons -------------------------------------------------------------------------

    def do(self, command: str) -> tuple[bool, str]:
        answer = keeper_client.ask(self._folder, command) or {}
        return bool(answer.get("ok")), str(answer.get("text") or "the run is about to start, or to end: ask again")

    def earlier(self) -> list[dict[str, Any]]:
        return earlier_runs()

    def curves(self, run: int) -> dict[str, dict[str, Any]]:
        return mean_curves(run)
