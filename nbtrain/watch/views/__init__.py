"""The views that show a run while it goes on, one per file, and the choice among them."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import nbtrain.machine.host as host
from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import BUNDLE, Controls, Screen, View

MONITORS = ("auto", *registry.VIEWS)
EXECUTORS = ("PAPERMILL_", "NBCLIENT_")
"""prefixes of environment variables of programs that run notebooks unattended"""
WITHOUT_WIDGETS = ("Databricks",)
"""environments whose pages do not load other people's widgets"""

_said: set[str] = set()


class NoView:
    """`--monitor off`: shows nothing."""

    def __init__(self, feed: Feed, controls: Controls | None, screen: Screen, at_once: bool = False) -> None: ...
    def opened(self, summary: str) -> None: ...
    def tick(self, now: float) -> None: ...
    def cleared(self) -> None: ...
    def closed(self, ok: bool) -> None: ...


def choose(
    monitor: str, shell: Any, feed: Feed, controls: Controls | None, screen: Screen, at_once: bool = False
) -> View:
    """The view for `--monitor`; `shell` is the running InteractiveShell, or None in a plain script. `at_once`: there is
    something to see already.

    A kernel cannot know whether a browser or nbconvert is at the other end. So a widget carries a text along, and only
    where the environment says that nobody is looking, lines of text are shown instead.
    """
    if monitor not in MONITORS:
        raise UsageError(f"unknown monitor {monitor!r}; there are: {', '.join(MONITORS)}")
    in_kernel = getattr(shell, "kernel", None) is not None
    asked = monitor
    if monitor == "auto":
        monitor = "widget" if in_kernel and not _unattended() else "text"
    entry = registry.view(monitor)
    if entry.needs.notebook and not in_kernel:
        raise UsageError(f"--monitor {monitor} needs a notebook, and this is a terminal; write --monitor text")
    if monitor == "widget" and (lacking := no_widget()):
        entry = registry.view(entry.instead)
        if asked == "widget" and lacking not in _said:
            _said.add(lacking)
            screen.line(f"nbtrain: {lacking}; plain HTML is shown instead")
    view: View = entry.load()(feed, controls, screen, at_once=at_once or asked == "widget")
    return view


@cache
def _unattended() -> bool:
    """Whether a program runs the notebook. It says so before it starts the kernel, so it is asked once."""
    return any(name.startswith(EXECUTORS) for name in os.environ)


def no_widget() -> str:
    """Why a widget cannot be shown; empty where it can."""
    where = host.environment()
    if where in WITHOUT_WIDGETS:
        return f"{where} shows no widgets of other packages"
    if not BUNDLE.is_file():
        return "this nbtrain was installed without its front end"
    try:
        _version("anywidget")
        widgets = int(_version("ipywidgets").split(".")[0])
    except (PackageNotFoundError, ValueError) as error:
        return f"widgets need anywidget and ipywidgets ({error})"
    if widgets < 8 and where != "Colab":
        return f"widgets need ipywidgets 8, and here it is {_version('ipywidgets')}"
    return ""


@cache
def _version(name: str) -> str:
    """Read from the disk once, and not for every cell."""
    return version(name)
