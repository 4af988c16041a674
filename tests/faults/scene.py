"""One real kernel, one strategy, one way of starting ranks: where a fault is played, and what must be so after it.

    scene.prepare()                          # a seeded little world in the notebook
    result = scene.cell(BODY)                # under %%distributed of this strategy and start
    scene.check_after(result, BODY)          # all before, or exactly the step it says; nothing left behind

*All before* is exact: the bytes and the identity of every object, the names, the random streams. *All after* is
compared with a trajectory: the same cell run unharmed on the same ranks, the world described after each of its steps.
Under `none`, which has no synchronisation, the trajectory is rank 0's. Where ranks hold pieces none of them can
describe the world: the same cell is run once more, ends after the step that is asked for, and the notebook tells.

A body is the text of a cell; its loops call `mark()` when a step is done (world.py). Lines that end with `# harm`
are left out of it when the trajectory is recorded.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from nbtrain.base.specs import Needs
from nbtrain.machine import registry
from tests.faults import world
from tests.faults.census import Census, role_of
from tests.support.kernels import Error, Kernel, Result, running_kernel

SETTLES = 8.0
"""Seconds in which what has ended must be gone; far more than it takes."""
_HARM = re.compile(r"^.*# harm *\n?", re.M)
_STOPPED = re.compile(r"stopped (?:after step ([\d,]+)|before a step was finished); what the cell did until then is in")
_HELD = re.compile(r"Step ([\d,]+) was kept: %distributed recover")


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

    def entry(self) -> Entry:
        return Entry(self.told, self.marks, self.taken)

    ids: dict[str, list[int]]
    made: list[int]
    """identities of what training makes inside of optimizers"""
    streams: str
    names: list[str]
    """that were not there when the world was made"""


@dataclass(slots=True)
class Trajectory:
    """What a cell makes of the world, step by step."""

    last: Entry
    """at its end: what a cell does after its last step belongs to that"""
    found: dict[int, Entry] = field(default_factory=dict)
    """after so many marked steps"""
    play: Callable[[int], Entry] | None = None
    """finds what is missing"""

    def after(self, marks: int) -> Entry:
        marks = min(marks, self.last.marks)
        if marks not in self.found and self.play is not None:
            self.found[marks] = self.play(marks)
        return self.found[marks]


@dataclass(frozen=True, slots=True)
class Combination:
    strategy: str
    start: str
    stage: int = 0
    """of ZeRO"""

    @property
    def needs(self) -> Needs:
        return registry.strategy(self.strategy).needs

    @property
    def devices(self) -> int:
        return 2 if self.needs.together else self.needs.max_ranks or 2

    @property
    def options(self) -> str:
        """Which ranks, on the line."""
        if self.start == MACHINES:
            return f"--engine elastic --nodes {self.devices} --devices 1"
        return f"--devices {self.devices} --start {self.start}"

    @property
    def ranks(self) -> int:
        return 1 if self.needs.together else self.devices

    @property
    def in_pieces(self) -> bool:
        """No rank has a whole model, and nothing can be brought home from one alone."""
        return registry.strategy(self.strategy).in_pieces

    def __str__(self) -> str:
        return f"{self.strategy}{self.stage or ''}-{self.start}"


MACHINES = "machines"
"""each rank is on a machine of its own: nodes, which the kernel's process has started"""
STARTS = ("warm", "spawn", MACHINES)
STAGES = {"deepspeed": (2, 3)}
COMBINATIONS = [
    Combination(name, start, stage)
    for name, entry in registry.STRATEGIES.items()
    if all(find_spec(package) for package in entry.needs.packages)
    for stage in STAGES.get(name, (0,))
    for start in STARTS
    if start != MACHINES or not (entry.needs.together or entry.needs.max_ranks)
]
"""Of every strategy that can be had here."""


def one_of_each(draw: random.Random) -> list[Combination]:
    """One for each strategy, as many kernels as a sample may cost: a stage, and a way to start. Fresh interpreters
    take seconds whenever a rank has died: they are for two of the strategies, which import nothing that takes long.
    Two more are on several machines, one with a whole model on each, one in pieces."""
    strategies = [*dict.fromkeys(one.strategy for one in COMBINATIONS)]
    quick = [name for name in strategies if not registry.strategy(name).needs.packages]
    slow = draw.sample(quick, 2)
    found = []
    for name in strategies:
        start = STARTS[name in slow]
        found.append(draw.choice([one for one in COMBINATIONS if (one.strategy, one.start) == (name, start)]))
    apart = [one for one in COMBINATIONS if one.start == MACHINES]
    return [*found, *(draw.choice([one for one in apart if one.in_pieces is pieces]) for pieces in (False, True))]


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
        self._trajectories: dict[tuple[str, str, str], Trajectory] = {}
        self._next = world.NEXT_IN_PIECES if combination.in_pieces else world.NEXT
        self.notebook("get_ipython().extension_manager.load_extension('nbtrain');")
        self.notebook(world.TOOLS + world.LOOK)
        if self.start == MACHINES:
            self.notebook(world.NODES % self.devices)
        self.prepare()
        # From here on there is all that stays: ranks, the threads of libraries (pyzmq has some for long texts), what
        # the first group of ranks leaves. A library may keep one group until it hears of the next: DeepSpeed does.
        self.notebook("print('.' * 200_000)")
        self.notebook(self.head() + world.ALONE + self._next)
        alone = combination.ranks == 1
        assert self.cell("1 / 0" if alone else "barrier()\nif rank: 1 / 0\nbarrier()").error is not None
        self.prepare()
        self.notebook(self.head() + world.ALONE + self._next)
        self.prepare()
        self.existed = self.census()

    # -- playing -------------------------------------------------------------------------

    def head(self, options: str = "") -> str:
        """The first line of a distributed cell."""
        stage = f"--stage {self.combination.stage} " * bool(self.combination.stage)
        return f"%%distributed --strategy {self.strategy} {stage}{self.combination.options} {options}\n"

    def notebook(self, code: str, timeout: float = 60) -> Result:
        """A cell, as it is, that must not raise."""
        result = self.kernel.run(code, timeout)
        assert result.error is None, f"{code}\n{result.text}"
        return result

    def prepare(self, extra: str = "") -> None:
        """A new world. `extra`: code that makes more of it and adds it to the dict `world`."""
        self._extra = extra
        apart = f"in_pieces = {self.combination.in_pieces}"
        self.notebook("\n".join([world.EMPTY, world.START, apart, extra, world.READY]))
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

    def trajectory(self, body: str, options: str = "", extra: str | None = None) -> Trajectory:
        """The world after each of the marked steps of this cell, unharmed. Leaves a newly prepared world."""
        extra = self._extra if extra is None else extra
        body = _HARM.sub("", body)
        key = extra, body, options
        if key not in self._trajectories:
            self.prepare(extra)
            found = {0: self.before.entry()}
            if self.combination.in_pieces:
                last = self._play(body, options)
                again = world.limited(body)
                self._trajectories[key] = Trajectory(
                    last, found, lambda marks: self._play(again, options, extra, marks)
                )
            else:
                last = self._play(body, options, before="recording = True")
                shown = self.notebook("print('trace:' + json.dumps(trace))").stdout
                for entry in json.loads(shown.rsplit("trace:", 1)[1]):
                    found[entry["marks"]] = Entry(**entry)
                self._trajectories[key] = Trajectory(last, found)
        self.prepare(extra)
        return self._trajectories[key]

    def _play(self, body: str, options: str, extra: str | None = None, limit: int = 0, before: str = "") -> Entry:
        """What this cell makes of the world; of a new one, if `extra` is given. With a limit, that is left prepared."""
        if extra is not None:
            self.prepare(extra)
        self.notebook(before or f"limit = {limit}")
        result = self.cell(body, options)
        assert result.error is None, f"the cell fails by itself:\n{result.text}"
        entry = self.state().entry()
        assert limit in (0, entry.marks), f"{entry.marks} steps instead of {limit}"
        if extra is not None:
            self.prepare(extra)
        return entry

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
            if step == 0 and now.marks == 0:  # one that never ends has no trajectory
                trajectory = Trajectory(before.entry(), {0: before.entry()})
            else:
                trajectory = self.trajectory(body, options, extra)
            _check_entry(now, trajectory, step, shown)
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

    def _check_next(self, shown: str) -> None:
        """The next cell works, whatever the notebook has now, and its ranks agree."""
        said = self.kernel.run(self.head() + world.ALONE + self._next)
        assert said.error is None, f"the next cell fails:\n{said.text}\nafter\n{shown}"
        if self.strategy != "none":
            assert self.notebook("print(alike)").stdout == "1\n", f"ranks differ in the next cell, after\n{shown}"

    def _check_trains(self, shown: str) -> None:
        """From a new world on, ranks do exactly what they did before anything happened to them."""
        expected = self.trajectory(self._next, extra="").last
        self.notebook(self.head() + world.ALONE + self._next)
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


def _check_entry(now: State, trajectory: Trajectory, step: int | None, shown: str) -> None:
    """The notebook is exactly at the step that was announced; without one, at the end of the cell."""
    entry = trajectory.last if step is None else trajectory.after(now.marks)
    values = [name for name, told in entry.told.items() if now.told[name] != told]
    near = [i for i, one in sorted(trajectory.found.items()) if one.told["model"] == now.told["model"]]
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
