"""What a notebook has of a detached run: `nbtrain.detached(7)`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbtrain.annexes.detached import keeper_client
from nbtrain.annexes.detached.output_log import OutputReader
from nbtrain.annexes.detached.run_folders import GOES_ON, TAKEN, RunFolder, find, versions
from nbtrain.base.errors import UsageError
from nbtrain.base.events import RESULT


class DetachedRun:
    """A run that goes on without the notebook, or has ended. `values` has what it made and changed, by name."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._values: dict[str, Any] | None = None

    def __repr__(self) -> str:
        step = f", step {steps:,}" if (steps := self.steps) else ""
        return f"<{self._folder}, {self.state}{step}>"

    @property
    def number(self) -> int:
        return self._folder.number

    @property
    def state(self) -> str:
        """`running`; `done`, `stopped`, `killed`, `failed`; `lost` with its process."""
        return self._folder.state

    @property
    def steps(self) -> int:
        """Steps that it has taken."""
        if (end := self._folder.end) is not None:
            return int(end.get("steps", 0))
        from nbtrain.annexes.detached.runs_table import NotedFeed

        noted = NotedFeed(self._folder)
        return noted.feed.figures.lead.steps if noted.read() else 0

    @property
    def output(self) -> str:
        """What it has printed until now."""
        return "".join(str(line.get("text", "")) for line in OutputReader(self._folder.path).new())

    @property
    def values(self) -> dict[str, Any]:
        """What it has made and changed, by name. They are objects of their own: %distributed attach puts it into the
        notebook's."""
        if self._values is None:
            self._values = self.read()[0]
        return self._values

    @property
    def result(self) -> Any:
        """What the function has returned that `nbtrain.run` has called."""
        return self.values.get(RESULT)

    def attach(self, now: bool = False) -> None:
        """As `%distributed attach`: show it until it has ended, and bring home what it has done. `now`: only what it
        trains, as after its newest whole step; it goes on."""
        from nbtrain.notebook.magics import verbs
        from nbtrain.notebook.magics.extension import state_here

        if (state := state_here()) is None:
            raise UsageError("attach shows a run below a cell of a notebook, after %load_ext nbtrain; `values` has it")
        verbs.run_verb(state, state.read(f"attach {self.number}{' --now' * now}"))

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(name → object, name → why it cannot be made here)"""
        from nbtrain.annexes.detached import result_file  # on use: it loads torch

        if self.state == GOES_ON:
            raise UsageError(f"{self!r}: it has not ended; %distributed attach {self.number} waits for it")
        if self._folder.end is None:
            raise UsageError(lost(self._folder))
        same_versions(self._folder)
        try:
            return result_file.read(self._folder.path, vars(sys.modules["__main__"]))
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{self._folder}: {error}. Its work is kept: sys.path.append({self._folder.about['cwd']!r}), where it "
                "was started, and write this line again"
            ) from error

    def stop(self) -> None:
        """End it after a whole step; what it has done until then is kept."""
        told(self._folder, "stop")

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Around a homecoming: one at a time, the next waits; and who has it is noted when it is complete."""
        with self._folder.alone("taking"):
            yield
            self._folder.write(TAKEN, {"pid": os.getpid(), "time": time.time()})


def detached(number: int | None = None) -> DetachedRun:
    """The detached run of this number; without one the newest."""
    return DetachedRun(find("" if number is None else str(number)))


def told(folder: RunFolder, command: str) -> str:
    """What the run answers."""
    if folder.state != GOES_ON:
        raise UsageError(f"{folder} does not run any more: it is {folder.state}{home_line(folder)}")
    answer = keeper_client.ask(folder, command)
    if answer is None or not answer.get("ok"):
        raise UsageError(f"{folder}: {(answer or {}).get('text') or 'it is about to start, or to end: ask again'}")
    return str(answer["text"])


def home_line(folder: RunFolder) -> str:
    """What brings its work home, if nobody has done so."""
    if folder.end is None or folder.read(TAKEN) is not None:
        return ""
    return f"; %distributed attach {folder.number} brings home its work"


def lost(folder: RunFolder) -> str:
    """What can be said of a run whose keeper is gone."""
    goes_on = f"; %distributed resume {folder.number} goes on from there" if has_saved(folder) else ""
    return f"{folder} is lost: its process was ended, or the machine was. {_saved(folder)}{goes_on}"


def same_versions(folder: RunFolder) -> None:
    """Nothing of it is opened in others."""
    if (there := folder.about.get("versions")) != (here := versions()):
        raise UsageError(
            f"{folder} was run by {there}, and here are {here}: attach from a notebook that has those. {_saved(folder)}"
        )


def checkpoints(folder: RunFolder) -> Path:
    """Where --save-every writes them."""
    about = folder.about
    return Path(str(about.get("cwd", ""))) / str(about.get("save_to", ""))


def has_saved(folder: RunFolder) -> bool:
    about = folder.about
    return bool(about.get("save_to") and checkpoints(folder).is_dir())


def _saved(folder: RunFolder) -> str:
    line = f"load({str(checkpoints(folder))!r}) takes its newest checkpoint"
    return line if has_saved(folder) else "It has written no checkpoint"
