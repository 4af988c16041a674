"""The rows of the table: the same work on every package, in turns."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch

from benchmarks.peers import work
from benchmarks.peers.notebook import (
    LIMIT,
    MARK,
    ON_ONE_MACHINE,
    WORK,
    Hangs,
    Notebook,
    end_marked,
    open_notebook,
    opened,
)
from benchmarks.peers.peer import ROOT, Cannot, Peer
from tests.support.kernels import Kernel, private_home, running_kernel

TRAINED = {"MLP": 200, "GPT": 60, "ResNet": 60}
"""steps of a training cell"""
AGAIN = 20
ENOUGH = ((20.0, 1), (10.0, 2), (1.0, 5))
"""Of what takes more than twenty seconds, one measurement is enough; more than ten: two; more than one: five."""
QUIET = 5.0
"""per cent of all processors"""
NOISE = 1.03
"""A step is mostly torch's own work, the same for all: a ratio that is so near to the best is the best."""


@dataclass(frozen=True)
class Reading:
    """What one package did in a row."""

    value: float | None
    words: str = ""
    ranked: bool = True
    """it did the same work as the others"""


@dataclass(frozen=True)
class Row:
    title: str
    unit: str
    readings: dict[str, Reading]
    control: str = ""
    slack: float = 1.0
    """so many times the best of the others is still first"""

    def others(self) -> dict[str, float]:
        """The values that nbtrain is held against."""
        return {
            name: reading.value
            for name, reading in self.readings.items()
            if name != "nbtrain" and reading.ranked and reading.value is not None
        }

    def first(self) -> bool:
        ours = self.readings["nbtrain"].value
        return ours is not None and all(ours <= self.slack * value for value in self.others().values())


@dataclass
class Found:
    """Collects measurements of a row, several for each package; the median is its value."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cannot: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    unranked: set[str] = field(default_factory=set)

    def measure(self, name: str, measured: Callable[[], float]) -> None:
        """Take one more measurement, unless this one failed before, or takes so long that a few are enough."""
        if self.over(name):
            return
        try:
            self.values[name].append(measured())
        except Cannot as why:
            good = self.values.pop(name, [])
            before = f"; before that {len(good)} times {statistics.median(good):.3g} s" if good else ""
            self.cannot[name] = f"{why}{before}"

    def drop_first(self, turns: int) -> None:
        """Forget the turns in which things were new; one measurement stays."""
        for values in self.values.values():
            del values[: min(turns, len(values) - 1)]

    def over(self, name: str) -> bool:
        """Whether there is nothing more to measure."""
        values = self.values[name]
        enough = any(values and values[-1] > seconds and len(values) >= few for seconds, few in ENOUGH)
        return enough or name in self.cannot

    def readings(self, names: Sequence[str], scale: float = 1.0, less: float = 0.0) -> dict[str, Reading]:
        return {name: self._reading(name, scale, less) for name in names}

    def _reading(self, name: str, scale: float, less: float) -> Reading:
        if name in self.cannot:
            return Reading(None, self.cannot[name])
        value = scale * (statistics.median(self.values[name]) - less)
        return Reading(value, self.words.get(name, ""), name not in self.unranked)


@dataclass(frozen=True)
class Bench:
    peers: Sequence[Peer]
    quick: bool
    """everything once: whether it works, not how fast"""

    def times(self, number: int) -> int:
        return 1 if self.quick else number

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self.peers]


def start(bench: Bench) -> Iterator[Row]:
    """From the start of a kernel to the end of the first cell in which the ranks have met."""
    for ranks in (2, 4):
        found = Found()
        for _ in range(bench.times(3)):
            for peer in bench.peers:
                found.measure(peer.name, partial(_first_cell, peer, ranks, found))
        imported = statistics.median(_seconds_of_kernel_with_torch() for _ in range(bench.times(3)))
        control = f"a kernel and `import torch`: {imported:.1f} s"
        yield Row(f"a new kernel, to the end of a first cell, {ranks} ranks", "s", found.readings(bench.names), control)


def cell(bench: Bench) -> Iterator[Row]:
    """An empty cell when everything is warm, over one of a kernel that has nothing loaded."""
    for ranks in (1, 2, 4, 8):
        found, bare = Found(), []
        with running_kernel() as plain, opened(bench.peers, ranks) as (notebooks, found.cannot):
            for turn in range(bench.times(60) + 3):
                bare.append(_bare_cell(plain))
                for name, notebook in _in_turn(notebooks, turn):
                    found.measure(name, partial(_empty_cell, notebook))
        less = statistics.median(bare)
        found.drop_first(3)
        for name, notebook in notebooks.items():
            if not notebook.peer.keeps_ranks:
                found.words[name] = "starts its ranks for each cell"
        rows = found.readings(bench.names, 1e3, less)
        yield Row(f"an empty warm cell, {ranks} rank{'s' * (ranks > 1)}", "ms", rows, f"over {1e3 * less:.1f} ms")


def tensor(bench: Bench) -> Iterator[Row]:
    """A tensor of the notebook that every rank reads, and one that a rank makes and the notebook has afterwards."""
    sizes = (1, 64) if bench.quick else (1, 64, 512)
    for size in sizes:
        sent, home = Found(), Found()
        # Each a gigabyte or more: one after another.
        groups = [[peer] for peer in bench.peers] if size > 64 else [list(bench.peers)]
        for group in groups:
            with opened(group, 2) as (notebooks, failed):
                sent.cannot.update(failed)
                home.cannot.update(failed)
                for turn in range(bench.times(10 if size == 1 else 3) + 1):
                    for name, notebook in _in_turn(notebooks, turn):
                        sent.measure(name, partial(_send, notebook, size, turn))
                        home.measure(name, partial(_home, notebook, size, turn))
        for way, found in ((f"{size} MB to 2 ranks", sent), (f"{size} MB home", home)):
            found.drop_first(1)
            yield Row(f"{way}, with the cell", "ms", found.readings(bench.names, 1e3))


def again(bench: Bench) -> Iterator[Row]:
    """A training cell that runs once more, and goes on with the model where the run before has left it."""
    found = Found()
    with opened(bench.peers, 2) as (notebooks, found.cannot):
        for name, notebook in notebooks.items():
            found.measure(name, partial(_make_model, notebook, "MLP"))
            found.measure(name, partial(_train_first, notebook, AGAIN))
            found.values[name].clear()
        for turn in range(bench.times(10)):
            for name, notebook in _in_turn(notebooks, turn):
                found.measure(name, partial(_continue, notebook, found))
    rows = found.readings(bench.names, 1e3)
    yield Row(f"a training cell of {AGAIN} steps, again, 2 ranks", "ms", rows)


def train(bench: Bench) -> Iterator[Row]:
    """A step on two ranks, by one of the same loop under torchrun that ran in the same turn."""
    for model, many in TRAINED.items():
        steps = many if not bench.quick else 20
        found, control = Found(), []
        with opened(bench.peers, 2) as (notebooks, found.cannot):
            for name, notebook in notebooks.items():
                found.measure(name, partial(_make_model, notebook, model))
                found.measure(name, partial(_train_first, notebook, 5))
                found.values[name].clear()
            for turn in range(bench.times(5)):
                before = _torchrun(model, steps)
                taken = Found()
                for name, notebook in _in_turn(notebooks, turn):
                    if name not in found.cannot:
                        taken.measure(name, partial(_step, notebook, steps))
                after = _torchrun(model, steps)
                control.append((before + after) / 2)
                found.cannot.update(taken.cannot)
                for name, values in taken.values.items():
                    found.values[name] += [value / control[-1] for value in values]
        told = f"torchrun: {1e3 * statistics.median(control):.1f} ms a step"
        yield Row(f"a step of the {model}, 2 ranks, by torchrun's", "×", found.readings(bench.names), told, NOISE)


def end(bench: Bench) -> Iterator[Row]:
    """Until the cell is over when one rank raises or dies while the other waits for it, or when Stop is pressed."""
    cases = {
        "a rank raises, until the cell has ended, 2 ranks": _raises,
        "a rank dies, until the cell has ended, 2 ranks": _dies,
        "Stop, until the cell has ended, 2 ranks": _stop,
    }
    for title, case in cases.items():
        found = Found()
        for _ in range(bench.times(3)):
            with opened([peer for peer in bench.peers if not found.over(peer.name)], 2) as (notebooks, failed):
                found.cannot.update(failed)
                for name, notebook in notebooks.items():
                    found.measure(name, partial(_ended, notebook, case, found))
        yield Row(title, "s", found.readings(bench.names))


def memory(bench: Bench) -> Iterator[Row]:
    """Pages that a process shares with nobody, when four ranks have met and nothing runs."""
    each, all_of_them = Found(), Found()
    for peer in bench.peers:
        if not peer.keeps_ranks:
            each.cannot[peer.name] = all_of_them.cannot[peer.name] = "has no idle ranks: starts them for each cell"
            continue
        with opened([peer], 4) as (notebooks, failed):
            each.cannot.update(failed)
            all_of_them.cannot.update(failed)
            for notebook in notebooks.values():
                ranks = notebook.meet()
                time.sleep(1)
                each.measure(peer.name, partial(_private, ranks, statistics.median))
                started = [process.pid for process in notebook.processes()]
                all_of_them.measure(peer.name, partial(_private, started, sum))
                all_of_them.words[peer.name] = f"{len(started)} processes"
    yield Row("private memory of an idle rank, 4 ranks", "MB", each.readings(bench.names, 1e-6))
    yield Row("of all processes beside the kernel, 4 ranks", "MB", all_of_them.readings(bench.names, 1e-6))


def left(bench: Bench) -> Iterator[Row]:
    """Processes, listening sockets and files in /dev/shm, two seconds after the kernel."""
    for how, kill in (("shut down", False), ("killed", True)):
        found = Found()
        for peer in bench.peers:
            with opened([peer], 2) as (notebooks, failed):
                found.cannot.update(failed)
                for notebook in notebooks.values():
                    what = notebook.end(kill)
                    found.values[peer.name].append(what.processes + what.sockets + what.files)
                    found.words[peer.name] = what.words()
        yield Row(f"left behind when the kernel is {how}", "", found.readings(bench.names))


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    group.__name__: group for group in (start, cell, tensor, again, train, end, memory, left)
}


def _in_turn(notebooks: dict[str, Notebook], turn: int) -> Iterator[tuple[str, Notebook]]:
    """Another one first in each turn: what ran before leaves the caches and the clock of the processor as they are. And
    each when the machine is quiet: Ray ends processes for a second after its cell, which made who came next a third
    slower."""
    found = list(notebooks.items())
    first = turn % max(1, len(found))
    for one in found[first:] + found[:first]:
        _until_quiet()
        yield one


def _until_quiet(longest: float = 3.0) -> None:
    """Until the processors have done next to nothing for a fifth of a second."""
    until = time.monotonic() + longest
    while psutil.cpu_percent(0.2) > QUIET and time.monotonic() < until:
        pass


def _seconds_of_kernel_with_torch() -> float:
    began = time.perf_counter()
    with running_kernel() as plain:
        plain.run("import torch")
        return time.perf_counter() - began


def _first_cell(peer: Peer, ranks: int, found: Found) -> float:
    with open_notebook(peer, ranks) as notebook:
        found.words[peer.name] = notebook.get_ready()
        return time.perf_counter() - notebook.opened


def _empty_cell(notebook: Notebook) -> float:
    return notebook.seconds(notebook.peer.cell("pass", notebook.ranks))


def _bare_cell(plain: Kernel) -> float:
    began = time.perf_counter()
    plain.run("pass")
    plain.client.get_shell_msg(timeout=LIMIT)
    return time.perf_counter() - began


def _send(notebook: Notebook, size: int, turn: int) -> float:
    file = notebook.file()
    code = f"{WORK}.tell({file!r}, float(x.sum()))"
    cell = notebook.peer.send(code, notebook.ranks)
    notebook.good(f"import torch; x = torch.zeros({size} * 250_000); x[-1] = {turn}")
    seconds = notebook.seconds(cell)
    if work.told(file) != dict.fromkeys(range(notebook.ranks), float(turn)):
        raise Cannot("the ranks do not have it")
    return seconds


def _home(notebook: Notebook, size: int, turn: int) -> float:
    file = notebook.file()
    code = f"import torch\ny = torch.zeros({size} * 250_000); y[-1] = {turn}"
    seconds = notebook.seconds(notebook.peer.home(code, notebook.ranks))
    notebook.good(f"{WORK}.tell({file!r}, [float(y.sum()), y.numel()])")
    if work.told(file) != {0: [float(turn), size * 250_000]}:
        raise Cannot("the notebook does not have it")
    return seconds


def _make_model(notebook: Notebook, model: str) -> float:
    make = f"from benchmarks.peers import work\nmodel, optimizer, batch = work.make({model!r})"
    return sum(notebook.seconds(cell) for cell in notebook.peer.make_model(make, notebook.ranks))


def _train(notebook: Notebook, steps: int) -> tuple[float, list[float]]:
    """Seconds of the cell; the first loss, the last, seconds of a step."""
    file = notebook.file()
    loop = f"work.loop(model, optimizer, batch, {steps}, {file!r})"
    seconds = notebook.seconds(notebook.peer.train(loop, notebook.ranks))
    told = work.told(file)
    if 0 not in told:
        raise Cannot("the cell ends without having trained")
    return seconds, told[0]


def _train_first(notebook: Notebook, steps: int) -> float:
    return _train(notebook, steps)[0]


def _step(notebook: Notebook, steps: int) -> float:
    return _train(notebook, steps)[1][2]


def _continue(notebook: Notebook, found: Found) -> float:
    """The seconds; that it did not go on with the trained model is noted."""
    started = _first_loss(notebook)
    seconds, (first, _, _) = _train(notebook, AGAIN)
    if abs(first - started) < 0.1 * started:
        found.unranked.add(notebook.peer.name)
        found.words[notebook.peer.name] = "begins anew: what was trained is lost"
    return seconds


def _first_loss(notebook: Notebook) -> float:
    """The loss of the model as it was made."""
    model, _, (x, y) = work.make("MLP")
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(x), y))


def _torchrun(model: str, steps: int) -> float:
    """Seconds of a step of the loop in a script."""
    _until_quiet()
    with private_home() as home, socket.create_server(("127.0.0.1", 0)) as free:
        file, mark = str(home / "told"), uuid.uuid4().hex
        port = str(free.getsockname()[1])
        free.close()
        where = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        what = ["-m", "benchmarks.peers.torchrun_loop", model, str(steps), file]
        command = [sys.executable, "-m", "torch.distributed.run", *where, *what]
        environment = {**os.environ, **ON_ONE_MACHINE, MARK: mark}
        try:
            run = partial(subprocess.run, command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=LIMIT)
            if run().returncode:  # gloo's threads abort a process that is ending, now and then
                run(check=True)
        finally:
            end_marked(mark)
        return float(work.told(file)[0][2])


def _ended(notebook: Notebook, case: Callable[[Notebook], tuple[float, str]], found: Found) -> float:
    """Seconds; what was to be seen then, and whether the next cell runs, becomes the words."""
    seconds, seen = case(notebook)
    try:
        notebook.meet()
        after = ""
    except Cannot as why:
        after = f"the next cell: {why}"
    found.words[notebook.peer.name] = "; ".join(filter(None, [seen, after]))
    return seconds


def _raises(notebook: Notebook, how: str = "raises") -> tuple[float, str]:
    file = notebook.file()
    code = f"{WORK}.fail({file!r}, {how!r})"
    result = notebook.run(notebook.peer.cell(code, notebook.ranks))
    ended = time.time()
    told = work.told(file)
    if 1 not in told:
        raise Cannot("the ranks do not run it")
    return ended - told[1], "" if result.error else "the error is only printed: the cell counts as a success"


def _dies(notebook: Notebook) -> tuple[float, str]:
    return _raises(notebook, "dies")


def _stop(notebook: Notebook) -> tuple[float, str]:
    file = notebook.file()
    code = f"{WORK}.compute({file!r}, {2 * LIMIT})"
    began = time.monotonic()
    running = notebook.kernel.start(notebook.peer.cell(code, notebook.ranks))
    while len(work.told(file)) < notebook.ranks:
        if time.monotonic() - began > LIMIT:
            raise Hangs("the ranks do not run it")
        time.sleep(0.02)
    time.sleep(0.2)
    pressed = time.monotonic()
    notebook.kernel.interrupt()
    notebook.wait(running)
    ended = time.monotonic() - pressed
    time.sleep(0.3)
    stopped = time.time()
    time.sleep(0.5)
    return ended, "its ranks compute on" if work.beat(file).stat().st_mtime > stopped else ""


def _private(pids: Sequence[int], of: Callable[[list[float]], float]) -> float:
    return of([float(psutil.Process(pid).memory_full_info().uss) for pid in pids])
