"""`%distributed attach [RUN]`: shows a detached run while it goes on, and brings home what it has done."""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any

from nbtrain.annexes.detached import keeper_client
from nbtrain.annexes.detached.detached_run import GOES_ON, DetachedRun, lost
from nbtrain.annexes.detached.output_log import OutputReader
from nbtrain.annexes.detached.run_folders import RunFolder, find
from nbtrain.base.errors import RankError, UsageError
from nbtrain.compat import kernel
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

BEAT = 0.5
EVERY = 2.0
"""Seconds between two looks at how far it is."""
SHOWN = 100
"""Lines of what was missed that are shown of its beginning, and of its end."""


def attach(state: MagicsState, request: Request) -> None:
    words = [word.plain for word in request.words[1:]]
    if len(words) > 1:
        raise UsageError(f"attach takes the number of one run, not {' '.join(words[1:])!r}")
    folder = find(words[0] if words else "")
    output = _Output(folder)
    output.missed()
    try:
        _watch(state, folder, output)
    except KeyboardInterrupt:
        number = folder.number
        raise KeyboardInterrupt(
            f"{folder} goes on: %distributed attach {number} shows it again, %distributed runs stop {number} ends it"
        ) from None
    output.new()
    if folder.end is None:
        raise UsageError(lost(folder))
    _take_home(state, folder)


def _watch(state: MagicsState, folder: RunFolder, output: _Output) -> None:
    line, looked = _Line(state.shell, f"run {folder.number}"), 0.0
    while folder.state == GOES_ON:
        if time.monotonic() - looked > EVERY:
            looked = time.monotonic()
            line.show(words(keeper_client.figures(folder)))
        output.new()
        time.sleep(BEAT)


def words(figures: dict[str, Any]) -> str:
    """How far a run is."""
    rows = figures.get("ranks") or ()
    steps = max((row["step"] for row in rows), default=0)
    said = [f"step {steps:,}" if steps else ""]
    for key, curve in (figures.get("series") or {}).items():
        kind, _, name = key.partition("/")
        name, _, rank = name.rpartition("/")
        if (kind, rank) == ("metric", "0") and isinstance(curve["last"], int | float):
            said.append(f"{name} {curve['last']:.4g}")
    return " · ".join(filter(None, said))


def _take_home(state: MagicsState, folder: RunFolder) -> None:
    from nbtrain.annexes.detached.take_home import settle  # on use: it loads torch

    run, end = DetachedRun(folder), folder.end or {}
    with run.taking():
        coming, left = run.read()
        said = settle(state.notebook, coming, folder.read("sent.json") or {}, f"nbtrain.detached({folder.number})")
    for sentence in said:
        print(f"nbtrain: {sentence}")
    for name, why in {**end.get("left", {}), **left}.items():
        print(f"nbtrain: {name}: it cannot come home: {why}")
    how, steps = end.get("how"), end.get("steps", 0)
    if how == "done":
        print(f"nbtrain: {folder} is done, {steps:,} steps; what it did is in the notebook")
    elif how == "stopped":
        print(f"nbtrain: {folder} was stopped after step {steps:,}; what it did until then is in the notebook")
    elif how == "killed":
        print(f"nbtrain: the ranks of {folder} were ended at once; nothing that they did is in the notebook")
    else:
        error = RankError("\n".join(end.get("lines", ())) or "it has failed")
        kernel.show_as(error, [*end.get("lines", ()), f"nbtrain: {folder} has failed. {end.get('kept', '')}"])
        raise error


class _Output:
    """Shows what the run prints, below the cell that attaches."""

    def __init__(self, folder: RunFolder) -> None:
        self._reader = OutputReader(folder.path)

    def missed(self) -> None:
        """What was printed before, its middle folded."""
        lines = list(self._reader.new())
        if len(lines) > 2 * SHOWN:
            self._show(lines[:SHOWN])
            number = len(lines) - 2 * SHOWN
            print(f"… {number:,} pieces of output between: nbtrain.detached().output has all that is kept …")
            lines = lines[-SHOWN:]
        self._show(lines)

    def new(self) -> None:
        self._show(list(self._reader.new()))

    def _show(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "gone" in line:
                print(f"… {line['gone']:,} pieces of output were let go of for want of room …")
            elif (text := line.get("text")) is not None:
                (sys.stderr if line.get("stream") == "stderr" else sys.stdout).write(text)
            elif (data := line.get("display")) is not None:
                from IPython.display import display

                shown_as = (line.get("transient") or {}).get("display_id")
                again = {"display_id": shown_as, "update": bool(line.get("update"))} if shown_as else {}
                display(data, raw=True, **again)


class _Line:
    """One line that is shown anew; a terminal shows the output alone."""

    def __init__(self, shell: Any, title: str) -> None:
        self._publisher, self._title = shell.display_pub, title
        self._page = hasattr(shell, "kernel")
        self._id, self._shown = uuid.uuid4().hex, ""

    def show(self, said: str) -> None:
        if said and said != self._shown and self._page:
            data = {"text/plain": f"{self._title} · {said} · ■ ends the watching, not the run"}
            self._publisher.publish(data, {}, transient={"display_id": self._id}, update=bool(self._shown))
            self._shown = said
