"""What shows a run while it goes on: one sink of events per file, and the choice among them."""

from __future__ import annotations

import os
import sys
from typing import Any

from nbtrain.errors import UsageError
from nbtrain.events import Event, Sink

MONITORS = ("auto", "html", "text", "off")
EXECUTORS = ("PAPERMILL_", "NBCLIENT_")
"""how the environment variables of programs begin that run notebooks without anybody looking"""


class NoView:
    """`--monitor off`: a Sink that shows nothing."""

    def opened(self, summary: str) -> None:
        pass

    def receive(self, event: Event) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def closed(self, ok: bool) -> None:
        pass


def choose(monitor: str, shell: Any) -> Sink:
    """The view for `--monitor`; `shell` is the running InteractiveShell, or None in a plain script.

    A kernel cannot know whether a browser or nbconvert is at the other end, so there it is HTML, which carries
    its text along; only where the environment says that nobody looks is it lines of text.
    """
    if monitor not in MONITORS:
        raise UsageError(f"unknown monitor {monitor!r}; there are: {', '.join(MONITORS)}")
    in_kernel = getattr(shell, "kernel", None) is not None
    if monitor == "auto":
        monitor = "html" if in_kernel and not any(name.startswith(EXECUTORS) for name in os.environ) else "text"
    if monitor == "off":
        return NoView()
    if monitor == "text":
        from nbtrain.views.text import TextView

        return TextView(_write)
    if not in_kernel:
        raise UsageError("--monitor html needs a notebook, and this is a terminal; write --monitor text")
    from nbtrain.views.html import HtmlView, notebook_display

    return HtmlView(notebook_display())


def _write(text: str) -> None:
    """To what sys.stdout is now: IPython and pytest replace it."""
    sys.stdout.write(text)
    sys.stdout.flush()
