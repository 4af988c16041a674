"""One real kernel, one strategy, one way of starting ranks: where a fault is played, and what must be so after it.

    scene.prepare()                          # a seeded little world in the notebook
    result = scene.cell(BODY)                # under %%distributed of this strategy and start
    scene.check_after(result, BODY)          # all before, or exactly the step it says; nothing left behind

*All before* is exact: the bytes and the identity of every object, the names, the random streams. *All after* is
compared with a trajectory: the same cell run unharmed on the same ranks, the world described after each of its steps.
Under `none`, which has no synchronisation, the trajectory is rank 0's.

A body is the text of a cell; its loops call `mark()` when a step is done (world.py). Lines that end with `# harm`
are left out of it when the trajectory is recorded.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults import world
from tests.faults.census import Census, role_of
from tests.kernels import Error, Kernel, Result, running_kernel

SETTLES = 8.0
"""Seconds in which what has ended must be gone; far more than it takes."""
_HARM = re.compile(r"^.*# harm *\n?", re.M)
_STOPPED = re.compile(r"stopped (?:after step ([\d,]+)|before a step was finished); what the cell did until then is in")
_HELD = re.compile(r"Step ([\d,]+) is held: %distributed recover")


@dataclass(frozen=True, slots=True)
class Entry:
    """The world after a step of a cell that nothing happened to."""

    told: dict[str, str]
    """object → a digest of its value"""
    marks: int
    """steps that have been marked"""
    taken: int
    """and those of them in which an optimizer has stepped"""


@dataclass(frozen=True, slots=True)
class State(Entry):
    """What the notebook has."""

    ids: dict[str, list[int]]
    made: list[int]
    """identities of what training makes inside of optimizers"""
    streams: str
    names: list[str]
    """that were not there when the world was made"""


@dataclass(frozen=True, slots=True)
class Combination:
    strategy: str
    start: str

    @property
    def devices(self) -> int:
        return 1 if self.strategy == "single" else 2

    def __str__(self) -> str:
        return f"{self.strategy}-{self.start}"


COMBINATIONS = [Combination(strategy, start) for strategy in ("single", "ddp", "none") for start in ("warm", "spawn")]


class Scene:
    """See the module."""

    before: State
    """what the notebook had when it was prepared"""
    existed: Census
    """what there was before the first fault: it may not grow from one to the next either"""

    def __init__(self, kernel: Kernel, folder: Path, combination: Combination) -> None:
        """`folder`: the kernel's own temporary directory."""
        self.kernel = kernel
        self.folder = folder
        self.combination = combination
        self.strategy, self.start, self.devices = combination.strategy, combination.start, combination.devices
        self._extra = ""
        self._trajectories: dict[tuple[str, str, str], list[Entry]] = {}
        self.notebook("get_ipython().extension_manager.load_extension('nbtrain');")
        self.notebook(world.TOOLS + world.LOOK)
        self.prepare()
        # From here on there is all that stays: ranks, the threads of libraries (pyzmq has some for long texts), what
        # the first group of ranks leaves.
        self.notebook("print('.' * 200_000)")
        self.notebook(self.head() + world.ALONE + world.NEXT)
        assert self.cell("1 / 0" if self.devices == 1 else "barrier()\nif rank: 1 / 0\nbarrier()").error is not None
        self.prepare()
        self.existed = self.census()

    # -- playing -------------------------------------------------------------------------

    def head(self, options: str = "") -> str:
        """The first line of a distributed cell."""
        return f"%%distributed --strategy {self.strategy} --devices {self.devices} --start {self.start} {options}\n"

    def notebook(self, code: str, timeout: float = 60) -> Result:
        """A cell, as it is, that must not raise."""
        result = self.kernel.run(code, timeout)
        assert result.error is None, f"{code}\n{result.text}"
        return result

    def prepare(self, extra: str = "") -> None:
        """A new world. `extra`: code that makes more of it and adds it to the dict `world`."""
        self._extra = extra
        self.notebook("\n".join([world.EMPTY, world.START, extra, world.READY]))
        self.before = self.state()

    def cell(self, body: str, options: str = "", timeout: float = 60) -> Result:
        """A distributed cell, to its end. What it raised is in `.error`."""
        return self.kernel.run(self.head(options) + world.ALONE + body, timeout)

    def begin(self, body: str, options: str = "") -> Result:
        """A distributed cell, fired; `scene.kernel.wait(result)` waits for its end."""
        return self.kernel.start(self.head(options) + world.ALONE + body)

    def stop(self) -> None:
        """The ■ button."""
        self.kernel.interrupt()

    # -- looking -------------------------------------------------------------------------

    def state(self) -> State:
        """What the notebook has now, described by the notebook itself."""
        shown = self.notebook("print('state:' + _look())").stdout
        return State(**json.loads(shown.rsplit("state:", 1)[1]))

    def census(self) -> Census:
        return Census.take(self.kernel, self.folder)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, as the notebook is told them."""
        status = self.notebook("%distributed status").stdout
        return [psutil.Process(int(pid)) for pid in re.findall(r"process (\d+)", status)]

    def ranks_now(self) -> list[psutil.Process]:
        """The same, found without asking the notebook, which may be busy."""
        return [process for process in self.kernel.children() if role_of(process, self.kernel.pid) == "rank"]

    def trajectory(self, body: str, options: str = "", extra: str | None = None) -> list[Entry]:
        """Entry N: the world after N marked steps of this cell, unharmed. Leaves a newly prepared world."""
        extra = self._extra if extra is None else extra
        body = _HARM.sub("", body)
        key = extra, body, options
        if key not in self._trajectories:
            self.prepare(extra)
            first = self.before
            self.notebook("recording = True")
            result = self.cell(body, options)
            assert result.error is None, f"the cell fails by itself:\n{result.text}"
            shown = self.notebook("print('trace:' + json.dumps([trace, {'told': told(world)}]))").stdout
            entries, last = json.loads(shown.rsplit("trace:", 1)[1])
            found = [Entry(first.told, first.marks, first.taken), *(Entry(**entry) for entry in entries)]
            # What a cell does after its last step belongs to its end.
            self._trajectories[key] = [*found, Entry(last["told"], found[-1].marks, found[-1].taken)]
        self.prepare(extra)
        return self._trajectories[key]

    # -- what must be so -----------------------------------------------------------------

    def check_after(
        self, result: Result, body: str, options: str = "", leaves: Mapping[str, int] | None = None
    ) -> None:
        """All that is promised after a cell that was run from the prepared world. What is promised is read from what
        it has shown: that it has ended, was stopped after a step, or failed, with or without a step that is held.
        `leaves`: so much more of this (census.py) is the user's own. Leaves a newly prepared world."""
        shown, before, extra = result.text, self.before, self._extra
        now = self.state()
        step = announced(result.error)
        if result.error is not None and step is None:
            self.check_before(now, shown)
            held = _HELD.search(result.error.traceback + result.error.evalue)
            if held:
                said = self.notebook("%distributed recover").stdout
                assert f"until step {held[1]}" in said, said
                step, now = _number(held[1]), self.state()
        self._check_next(shown)
        self._settle(leaves or {}, shown)
        if result.error is None or step is not None:
            assert now.ids == before.ids, f"other objects than before the cell\n{shown}"
            entries = self._until(step, now, before) or self.trajectory(body, options, extra)
            _check_entry(now, entries, step, shown)
        self._check_trains(shown)
        self.prepare(extra)

    def check_works(self, shown: str) -> None:
        """What must be so whatever has come home. Leaves a newly prepared world."""
        extra = self._extra
        self._check_next(shown)
        self._settle({}, shown)
        self._check_trains(shown)
        self.prepare(extra)

    def check_before(self, now: State, shown: str) -> None:
        """The notebook is exactly as it was when it was prepared."""
        values = [name for name, told in self.before.told.items() if now.told[name] != told]
        assert not values, f"not as before the cell: {', '.join(values)}\n{shown}"
        assert now.ids == self.before.ids, f"other objects than before the cell\n{shown}"
        assert now.made == self.before.made, f"an optimizer's state is another object\n{shown}"
        assert now.streams == self.before.streams, f"random streams have moved\n{shown}"
        assert now.names == self.before.names, f"new names: {now.names}\n{shown}"

    def _until(self, step: int | None, now: State, before: State) -> list[Entry]:
        """A cell that was stopped before its first step may be one that never ends: there is no trajectory of it."""
        return [Entry(before.told, before.marks, before.taken)] * 2 if step == 0 and now.marks == 0 else []

    def _check_next(self, shown: str) -> None:
        """The next cell works, whatever the notebook has now, and its ranks agree."""
        said = self.kernel.run(self.head() + world.ALONE + world.NEXT)
        assert said.error is None, f"the next cell fails:\n{said.text}\nafter\n{shown}"
        if self.strategy == "ddp":
            assert self.notebook("print(alike)").stdout == "1\n", f"ranks differ in the next cell, after\n{shown}"

    def _check_trains(self, shown: str) -> None:
        """From a new world on, ranks do exactly what they did before anything happened to them."""
        expected = self.trajectory(world.NEXT, extra="")[-1]
        self.notebook(self.head() + world.ALONE + world.NEXT)
        now = self.state()
        values = [name for name, told in expected.told.items() if now.told[name] != told]
        assert not values, f"the next cell trains otherwise: {', '.join(values)}, after\n{shown}"

    def _settle(self, leaves: Mapping[str, int], shown: str) -> None:
        """What there is more of than there was is gone within SETTLES."""
        deadline = time.monotonic() + SETTLES
        while more := self.census().more_than(self.existed, leaves):
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {'; '.join(more)}\nafter\n{shown}")
            time.sleep(0.05)


def announced(error: Error | None) -> int | None:
    """The step after which a cell says that it was stopped, with what it did in the notebook."""
    found = _STOPPED.search(error.evalue) if error is not None and error.ename == "KeyboardInterrupt" else None
    return _number(found[1] or "0") if found else None


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _check_entry(now: State, trajectory: list[Entry], step: int | None, shown: str) -> None:
    """The notebook is exactly at the step that was announced; without one, at the end of the cell."""
    entry = trajectory[-1] if step is None else trajectory[min(now.marks, len(trajectory) - 2)]
    values = [name for name, told in entry.told.items() if now.told[name] != told]
    near = [i for i, one in enumerate(trajectory[:-1]) if one.told["model"] == now.told["model"]]
    assert not values, (
        f"not as after {entry.marks} steps: {', '.join(values)} (weights are those of {near or 'no step'}; "
        f"{now.marks} marked, {now.taken} taken, announced: {step})\n{shown}"
    )
    assert step is None or now.taken == step, f"announced: step {step}; taken: {now.taken}\n{shown}"


@contextmanager
def open_scene(combination: Combination, **environment: str) -> Iterator[Scene]:
    """A kernel with a temporary directory of its own, and ranks in it."""
    with tempfile.TemporaryDirectory(prefix="scene-") as folder:
        private = {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        with running_kernel(**private | environment) as kernel:
            yield Scene(kernel, Path(folder), combination)
