"""`%distributed attach [RUN]`: shows a detached run while it goes on, and brings home what it has done."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.annexes.detached.detached_run import DetachedRun, lost
from nbtrain.annexes.detached.digests import digest, digests
from nbtrain.annexes.detached.output_log import OutputReader
from nbtrain.annexes.detached.run_folders import GOES_ON, RANDOM, RunFolder, every_run, find, started_here
from nbtrain.annexes.detached.shown_run import ShownRun
from nbtrain.base.errors import RankError, UsageError
from nbtrain.base.events import RESULT
from nbtrain.compat import kernel
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.notebook.output.screens import CellScreen
from nbtrain.notebook.report.exception_message import AS_BEFORE
from nbtrain.watch.runs.run_folder import notebook
from nbtrain.worker.random_states.default_generators import capture, packed, restore, unpacked

if TYPE_CHECKING:
    from nbtrain.annexes.detached.take_home import Homecoming

BEAT = 0.1
SHOWN = 100
"""Pieces of what was missed that are shown of its beginning, and of its end,"""
LETTERS = 100_000
"""and how long they are at most."""


came_home: dict[tuple[Path, float], dict[str, str]] = {}
"""runs whose work this notebook has → digests of what came home, by name; `OWN`: the notebook has kept its own"""
OWN = "own"


def attach(state: MagicsState, request: Request) -> None:
    words, own = [word.plain for word in request.words[1:]], dict(request.own)
    now = "--now" in own
    if now and (follows := own.pop("--now")) is not None:
        words.append(follows.plain)
    if own or len(words) > 1:
        raise UsageError(f"attach takes the number of one run, not {' '.join([*own, *words[1:]])!r}")
    folder = meant(state, words[0] if words else "", lambda run: run.key not in came_home)
    if now:
        from nbtrain.annexes.detached.weights_so_far import bring  # on use, as what else loads torch

        return bring(state, folder)
    screen = CellScreen(state.shell)
    said = ""
    shown, output = ShownRun(state.shell, folder, screen), _Output(folder, screen)
    try:
        shown.look()
        output.missed()
        while folder.state == GOES_ON:
            time.sleep(BEAT)
            shown.look()
            output.new()
            waits = folder.waits_for
            if waits and waits != said:
                screen.line(f"{folder}: {waits}")
            said = waits
    except KeyboardInterrupt:
        number = folder.number
        raise KeyboardInterrupt(
            f"{folder} goes on: %distributed attach {number} shows it again, %distributed runs stop {number} ends it"
        ) from None
    finally:
        shown.close()
    output.new()
    if folder.end is None:
        raise UsageError(lost(folder))
    if folder.key in came_home:
        print(
            f"nbtrain: {folder} is home already, and what was done since stays; its own is nbtrain.detached("
            f"{folder.number}).values"
        )
    else:
        take_home(state, folder)


def meant(state: MagicsState, word: str, suits: Callable[[RunFolder], bool]) -> RunFolder:
    """The run of this number; without one this notebook's newest that suits, before its others and another's."""
    here = notebook(state.notebook)
    own = [run for run in every_run() if run.key in started_here or here == run.about.get("notebook", "") != ""]
    if word or not own:
        folder = find(word)
        if not word and (by := folder.about.get("notebook")):
            print(f"nbtrain: {folder}, which {by} has started")
        return folder
    return max(own, key=lambda run: (suits(run), run.number))


def take_home(
    state: MagicsState, folder: RunFolder, check: Callable[[Homecoming], None] = lambda homecoming: None,
    only: Container[str] | None = None,
) -> None:  # fmt: skip
    """`check` may raise, before anything is touched. `only`: these names; the others are home already."""
    from nbtrain.annexes.detached.take_home import Homecoming  # on use: it loads torch
    from nbtrain.annexes.detached.weights_so_far import sent

    run, end = DetachedRun(folder), folder.end or {}
    with run.taking():
        came, left = run.read()
        noted = folder.read("sent.json") or {}
        own = {*noted.get("own", ()), RESULT}
        coming = {name: came[name] for name in came if name not in own and (only is None or name in only)}
        homecoming = Homecoming(state.notebook, coming, sent(folder), f"nbtrain.detached({folder.number})", end,
                                folder.key in started_here)  # fmt: skip
        check(homecoming)
        said = homecoming.settle()
        _settle_random_states(folder, noted.get("random", {}))
    kept = dict.fromkeys(homecoming.kept, OWN)
    came_home.setdefault(folder.key, {}).update({**digests(state.notebook, coming.keys() - kept.keys()), **kept})
    for sentence in said:
        print(f"nbtrain: {sentence}")
    for name, why in {**end.get("left", {}), **left}.items():
        print(f"nbtrain: {name}: it cannot come home: {why}")
    if RESULT in came:
        print(f"nbtrain: what the function has returned is nbtrain.detached({folder.number}).result")
    how, steps = end.get("how"), end.get("steps", 0)
    but = ", but for what is kept as yours above" if kept else ""
    if how == "done":
        print(f"nbtrain: {folder} is done, {steps:,} steps; what it did is in the notebook{but}")
    elif how == "stopped":
        print(f"nbtrain: {folder} was stopped after step {steps:,}; what it did until then is in the notebook{but}")
    elif how == "killed":
        print(f"nbtrain: the ranks of {folder} were ended at once; nothing that they did is in the notebook")
    else:
        # To the keeper it was a cell of its own: what that says of the notebook is not so here.
        lines = [line.partition(AS_BEFORE)[0] for line in end.get("lines", ())]
        error = RankError("\n".join(lines) or "it has failed")
        kernel.show_as(error, [*lines, f"nbtrain: {folder} has failed. {end.get('kept', '')}"])
        raise error


def _settle_random_states(folder: RunFolder, sent: Mapping[str, str]) -> None:
    """Generators that stand where they stood when the run was sent go on where it has left them."""
    states, now = pickle.loads(folder.get(RANDOM)), packed(capture())
    as_sent = {name: states[name] for name in states.keys() & now.keys() if sent.get(name) == digest(now[name])}
    restore(unpacked(as_sent))


def _short(lines: list[dict[str, Any]]) -> int:
    """How many of these are shown."""
    sizes = itertools.accumulate(len(line.get("text") or "") for line in lines)
    return sum(1 for size in itertools.islice(sizes, SHOWN) if size <= LETTERS) or 1


class _Output:
    """Shows what the run prints, below the cell that attaches."""

    def __init__(self, folder: RunFolder, screen: CellScreen) -> None:
        self._folder, self._screen = folder, screen
        self._reader = OutputReader(folder.path)

    def missed(self) -> None:
        """What was printed before, its middle folded."""
        lines = list(self._reader.new())
        first = _short(lines)
        last = _short(lines[first:][::-1]) if first < len(lines) else 0
        if (between := len(lines) - first - last) > 0:
            self._show(lines[:first])
            more = f"nbtrain.detached({self._folder.number}).output has all that is kept"
            self._screen.line(f"… {between:,} pieces of output between: {more} …")
            lines = lines[-last:]
        self._show(lines)

    def new(self) -> None:
        self._show(list(self._reader.new()))

    def _show(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "gone" in line:
                self._screen.line(f"… {line['gone']:,} pieces of output were let go of for want of room …")
            elif (text := line.get("text")) is not None:
                self._screen.write("stderr" if line.get("stream") == "stderr" else "stdout", text)
            elif (data := line.get("display")) is not None:
                self._screen.publish(data, {}, line.get("transient"), bool(line.get("update")))
