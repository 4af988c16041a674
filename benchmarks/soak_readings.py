"""What the soak reads of the processes of one kernel, once a cycle.

Memory is what a process has made or inherited, without files that it maps, after a garbage collection and
`malloc_trim`: what the allocator keeps for the next cell is no leak. Of a rank that includes pages that it shares with
the process it was forked from: they become its own whenever one of both writes to them, and its private memory grows
although it has no more than before.

Any notebook grows with its cells: IPython and Jupyter keep texts, histories and numbers of messages, and IPython 9
whatever a cell has printed and each traceback. So a kernel without nbtrain runs as many cells of the same texts, as
comments, which show the same, and what it has grown is taken off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.soak_cells import Notebook
from tests.support.kernels import Kernel, Result

SETTLE = "import gc, ctypes; gc.collect(); ctypes.CDLL(None).malloc_trim(0)"
BARE = "a kernel without nbtrain"
SHOW = """
import json, sys, torch
outputs = open({path!r})
def show():
    for kind, text in json.loads(outputs.readline()):
        if kind == "error":
            error = RuntimeError()
            error._render_traceback_ = lambda: text
            raise error
        getattr(sys, kind).write(text)
"""


@dataclass
class Reading:
    """The state of everything at the end of one cycle."""

    memory: dict[str, float] = field(default_factory=dict)
    """process → MB"""
    private: dict[str, float] = field(default_factory=dict)
    untrimmed: dict[str, float] = field(default_factory=dict)
    """private, before malloc_trim"""
    descriptors: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    held: float = 0.0
    """MB in files that are memory: they are no process's own"""
    shm: int = 0
    files: int = 0
    processes: int = 0


class Control:
    """The kernel without nbtrain."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._shown = kernel.home / "shown"
        self._shown.touch()
        kernel.run(SHOW.format(path=str(self._shown)))

    def follow(self, text: str, result: Result) -> None:
        """A cell that does nothing but show what that one has shown."""
        texts = [
            ("error", one["traceback"]) if one["type"] == "error" else (one["name"], one["text"])
            for one in result.outputs
            if one["type"] in ("error", "stream")
        ]
        if texts:
            with self._shown.open("a") as file:
                file.write(json.dumps(texts) + "\n")
        comment = "# " + text.replace("\n", "\n# ")
        after = self.kernel.run(f"{'show()' if texts else 'pass'}\n{comment}")
        same = after.stdout == result.stdout and after.stderr == result.stderr
        if not same or (after.error is None) != (result.error is None):
            raise RuntimeError(f"the control shows something else:\n{after.text}")


def take(nb: Notebook, control: Control) -> Reading:
    """The control runs what the notebook has run since the last reading."""
    found = Reading()
    pids = {"kernel": nb.kernel.pid} | {f"rank {rank}": pid for rank, pid in nb.pids().items()}
    (nursery,) = [p for p in psutil.Process(nb.kernel.pid).children() if "nursery" in " ".join(p.cmdline())]
    pids["nursery"] = nursery.pid
    nb(f"%%distributed\n{SETTLE.split(';')[0]}")  # what the last act has dropped is told to the ranks with a next cell
    found.untrimmed = {name: _private(pid) for name, pid in pids.items()}
    nb(f"%%distributed\n{SETTLE}")
    nb(SETTLE)
    for text, result in nb.ran:
        control.follow(text, result)
    nb.ran.clear()
    control.kernel.run(SETTLE)
    found.memory = {name: _anonymous(pid) for name, pid in pids.items()} | {BARE: _anonymous(control.kernel.pid)}
    found.private = {name: _private(pid) for name, pid in pids.items()}
    found.descriptors = {name: psutil.Process(pid).num_fds() for name, pid in pids.items()}
    found.threads = {name: psutil.Process(pid).num_threads() for name, pid in pids.items()}
    found.held = _held(pids.values())
    found.shm = len(os.listdir("/dev/shm"))
    found.files = sum(len(names) + len(folders) for _, folders, names in os.walk(_temporary(nb)))
    found.processes = len(nb.kernel.children())
    return found


def _temporary(nb: Notebook) -> str:
    return nb.value("__import__('tempfile').gettempdir()")


def _private(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().uss) / 1e6


def _anonymous(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return float(sum(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))) / 1e3


def _held(pids: Iterable[int]) -> float:
    blocks: dict[int, int] = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path).startswith("/memfd:"):
                    state = os.stat(path)
                    blocks[state.st_ino] = state.st_blocks
    return sum(blocks.values()) * 512 / 1e6
