"""What the soak reads of the processes of one kernel, once a cycle.

Memory is private memory: what would be free if this process alone ended. It is read after a garbage collection and
`malloc_trim`: what the allocator keeps for the next cell is no leak. What IPython itself keeps of every cell (its
text, twice or three times, and its history) is counted in the kernel and taken off: any notebook grows by that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.soak_cells import Notebook

SETTLE = "import gc, ctypes; gc.collect(); ctypes.CDLL(None).malloc_trim(0)"
RECORD = """
def _size(thing, seen):
    if id(thing) in seen: return 0
    seen.add(id(thing))
    inner = thing.values() if type(thing) is dict else thing if type(thing) in (list, tuple) else ()
    keys = sum(_size(key, seen) for key in thing) if type(thing) is dict else 0
    return sys.getsizeof(thing) + keys + sum(_size(one, seen) for one in inner)
def _record():
    shell, seen = get_ipython(), set()
    history = shell.history_manager
    mine = {k: v for k, v in linecache.cache.items() if 'ipykernel' in k or 'ipython' in k}
    interactive = getattr(linecache, '_interactive_cache', {})
    things = [In, Out, mine, history.input_hist_parsed, history.input_hist_raw, history.output_hist_reprs,
              getattr(history, 'outputs', {}), history.db_input_cache, history.db_output_cache,
              getattr(shell.compile, '_filename_map', {}), interactive,
              {k: v for k, v in shell.user_ns.items() if k[:2] == '_i'}]
    return sum(_size(thing, seen) for thing in things)
"""


@dataclass
class Reading:
    """The state of everything at the end of one cycle."""

    memory: dict[str, float] = field(default_factory=dict)
    """process → MB of its own; of the kernel, without IPython's record"""
    untrimmed: dict[str, float] = field(default_factory=dict)
    mapped: dict[str, float] = field(default_factory=dict)
    """with pages that are shared with the process it was forked from: a rank's own grow when that one writes, too"""
    descriptors: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    record: float = 0.0
    """MB that IPython keeps of its cells"""
    held: float = 0.0
    """MB in files that are memory: they are no process's own"""
    shm: int = 0
    files: int = 0
    processes: int = 0


def take(nb: Notebook) -> Reading:
    found = Reading()
    pids = {"kernel": nb.kernel.pid} | {f"rank {rank}": pid for rank, pid in nb.pids().items()}
    (nursery,) = [p for p in psutil.Process(nb.kernel.pid).children() if "nursery" in " ".join(p.cmdline())]
    pids["nursery"] = nursery.pid
    nb(f"%%distributed\n{SETTLE.split(';')[0]}")  # what the last act has dropped is told to the ranks with a next cell
    found.untrimmed = {name: _memory(pid) for name, pid in pids.items()}
    nb(f"%%distributed\n{SETTLE}")
    nb(SETTLE)
    found.record = float(nb.value("_record()")) / 1e6
    found.memory = {name: _memory(pid) for name, pid in pids.items()}
    found.memory["kernel"] -= found.record
    found.mapped = {name: _anonymous(pid) for name, pid in pids.items()}
    found.descriptors = {name: psutil.Process(pid).num_fds() for name, pid in pids.items()}
    found.threads = {name: psutil.Process(pid).num_threads() for name, pid in pids.items()}
    found.held = _held(pids.values())
    found.shm = len(os.listdir("/dev/shm"))
    found.files = sum(len(names) + len(folders) for _, folders, names in os.walk(_temporary(nb)))
    found.processes = len(nb.kernel.children())
    return found


def _temporary(nb: Notebook) -> str:
    return nb.value("__import__('tempfile').gettempdir()")


def _memory(pid: int) -> float:
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
