"""What is known of detached runs without asking their keepers, in a line for each; loads neither torch nor IPython."""

from __future__ import annotations

import time
from typing import Any

import nbtrain.base.humanize as humanize
from nbtrain.annexes.detached.run_folders import FIGURES, GOES_ON, TAKEN, RunFolder, every_run, versions
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import words

LINE = 40
"""letters of what it has printed last"""
PER_SECOND = 200_000
"""bytes of what a keeper has noted that are shown in a second, at most: a long history is shown anew less often"""


class NotedFeed:
    """The feed of a run, as far as it was noted."""

    def __init__(self, folder: RunFolder) -> None:
        self.feed = Feed({})
        self._folder, self._opens = folder, folder.about.get("versions") == versions()
        self._read: Any = None
        self._due = 0.0

    @property
    def words(self) -> str:
        """How far it is, or was at last, and what it has printed last."""
        if not self.read():
            return ""
        line = self.feed.figures.lead.line
        return " · ".join([*words(self.feed.figures)[1:], *([f"“{line[:LINE]}”"] if line else [])])

    def read(self, *, last: bool = False) -> bool:
        """Learn what was noted since the last call. Whether anything ever was. `last`: it is not called again."""
        path = self._folder.path / FIGURES
        if not self._opens:
            return False
        try:
            status = path.lstat()
            if self._read != (now := (status.st_ino, status.st_mtime_ns)) and (last or time.monotonic() >= self._due):
                self.feed.take(self._folder.get(FIGURES))
                self._read, self._due = now, time.monotonic() + status.st_size / PER_SECOND
        except OSError:  # nothing yet
            return self._read is not None
        return True


def until_when(until: float | None) -> str:
    """When --until ends it, by this machine's clock."""
    if until is None:
        return ""
    minutes = round(max(0.0, until - time.time()) / 60)
    left = f" (in {minutes // 60}h{minutes % 60:02}m)" if minutes else ""
    return f" until {time.strftime('%H:%M %Z', time.localtime(until))}{left}"


def going_on() -> list[str]:
    """A line for each that runs, for `status` and the doctor."""
    return [f"detached run {row}" for run in every_run() if run.state == GOES_ON for row in [table([run])]]


def table(every: list[RunFolder]) -> str:
    """One line for each."""
    if not every:
        return "there is no detached run: %%distributed --detach starts one"
    rows = [_row(run) for run in every]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: RunFolder) -> list[str]:
    about, end = run.about, run.end or {}
    state = run.state
    far = NotedFeed(run).words or (f"step {steps:,}" if (steps := end.get("steps", 0)) else "")
    if state == GOES_ON:
        state += until_when(about.get("until"))
    if waits := run.waits_for:
        state, far = waits, ""
    elif run.state not in (GOES_ON, "lost"):
        state += ", taken home" if run.read(TAKEN) is not None else f", not taken home, {humanize.size(run.size)}"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("began", 0)))
    cell = f"In [{about['cell']}]" if about.get("cell") is not None else ""
    return [str(run.number), began, state, far, str(about.get("line") or about.get("strategy", "")), cell,
            str(about.get("where", "")), str(about.get("notebook", ""))]  # fmt: skip
