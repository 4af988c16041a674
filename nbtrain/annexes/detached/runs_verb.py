"""`%distributed runs`: every detached run of this user, and what can be done with one."""

from __future__ import annotations

import time

import nbtrain.base.humanize as humanize
from nbtrain.annexes.detached.detached_run import GOES_ON, told
from nbtrain.annexes.detached.run_folders import TAKEN, RunFolder, every_run, find
from nbtrain.annexes.detached.shown_run import NotedFeed
from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

ACTIONS = ("stop", "where", "kill")
USAGE = "%distributed runs [stop|where|kill RUN] [--drop RUN]"


def runs(state: MagicsState, request: Request) -> str:
    own = dict(request.own)
    drops = "--drop" in own
    dropped = own.pop("--drop", None)
    given = [word.plain for word in request.words[1:]]
    if own or (given and (drops or len(given) > 2 or given[0] not in ACTIONS)):
        raise UsageError(f"runs takes one of these: {USAGE}")
    if drops:
        given = ["drop", dropped.plain if dropped is not None else ""]
    return done(given[0] if given else None, given[1] if given[1:] else "")


def done(action: str | None, run: str) -> str:
    """What is to be printed. `run`: the number as it is typed; empty: the newest."""
    if action is None:
        return table(every_run())
    folder = find(run)
    return _drop(folder) if action == "drop" else told(folder, {"where": "stacks"}.get(action, action))


def going_on() -> list[str]:
    """A line for each that runs, for `status` and the doctor."""
    return [f"detached run {row}" for run in every_run() if run.state == GOES_ON for row in [table([run])]]


def _drop(folder: RunFolder) -> str:
    if folder.state == GOES_ON:
        raise UsageError(f"{folder} is running: %distributed runs stop {folder.number} ends it first")
    said = f"{folder} is dropped, with all that it has left: {humanize.size(folder.size)}"
    folder.remove()
    return said


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
    if state not in (GOES_ON, "lost"):
        state += ", taken home" if run.read(TAKEN) is not None else f", not taken home, {humanize.size(run.size)}"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("began", 0)))
    cell = f"In [{about['cell']}]" if about.get("cell") is not None else ""
    return [str(run.number), began, state, far, str(about.get("line") or about.get("strategy", "")), cell,
            str(about.get("where", "")), str(about.get("notebook", ""))]  # fmt: skip
