"""What exists because of a kernel, counted from outside: processes, threads, descriptors by kind, files.

before = Census.take(kernel, folder)
...
more = Census.take(kernel, folder).more_than(before)      # lines; [] when nothing was left behind
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.hygiene import describe
from tests.support.kernels import Kernel

ALLOWED = {
    "kernel's threads": 1,  # one that is just ending
    # When a loader's worker dies torch tries how many files may be open, and may itself be interrupted at that.
    "files: tmp*": 12,
    # Segments live as long as the tensors that came in them.
    "kernel's memory files": 2,
    "a rank's memory files": 2,
    # A group that was given up is freed when the next one is.
    "a rank's threads": 3,
    "a rank's sockets": 1,
    "a rank's pipes": 2,
    "a rank's anon_inode": 1,
}
"""Growth by so much is no leak."""


@dataclass(frozen=True, slots=True)
class Census:
    """Numbers by what was counted."""

    counts: Counter[str]
    people: dict[str, list[str]]
    """which processes and files were counted as what, for the message"""

    @classmethod
    def take(cls, kernel: Kernel, folder: Path) -> Census:
        """`folder`: the kernel's own temporary directory, where its pools keep their files."""
        counts: Counter[str] = Counter()
        people: dict[str, list[str]] = {}
        of_ranks: dict[str, list[int]] = {}
        for process in [psutil.Process(kernel.pid), *kernel.children()]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                role = role_of(process, kernel.pid)
                found = _inside(process.pid)
                people.setdefault(role, []).append(describe(process))
                counts[f"processes: {role}"] += 1
                if role == "rank":  # the one that has most: they differ in who listens and who connects
                    for what, number in found.items():
                        of_ranks.setdefault(f"a rank's {what}", []).append(number)
                elif role in ("kernel", "nursery"):
                    for what, number in found.items():
                        counts[f"{role}'s {what}"] += number
        counts.update({what: max(numbers) for what, numbers in of_ranks.items()})
        counts["processes: zombie"] = sum(_is_zombie(p) for p in _below(kernel.pid))
        for path in [*_tree(folder), *_shared_memory({p.pid for p in kernel.children()} | {kernel.pid})]:
            kind = f"files: {re.sub('[a-z0-9_]{8}(?=/|$)|[0-9]+', '*', path)}"
            counts[kind] += 1
            people.setdefault(kind, []).append(path)
        return cls(counts, people)

    def more_than(self, before: Census, allowed: Mapping[str, int] | None = None) -> list[str]:
        """What there is more of, beyond what is allowed; of processes, what there is less of too."""
        allowed = Counter(ALLOWED) + Counter(allowed or {})  # what a fault leaves comes on top
        found = []
        for what in sorted(self.counts.keys() | before.counts.keys()):
            then, now = before.counts[what], self.counts[what]
            if now > then + allowed.get(what, 0) or (now < then and what in ("processes: rank", "processes: nursery")):
                who = self.people.get(what.removeprefix("processes: "), [])
                found.append(f"{what}: {then} → {now}" + (f" ({'; '.join(who)})" if who else ""))
        return found


def role_of(process: psutil.Process, kernel: int) -> str:
    """What a process is to the kernel with this number."""
    if process.pid == kernel:
        return "kernel"
    line, parent = " ".join(process.cmdline()), process.ppid()
    if "nbtrain.engines._local.nursery" in line:
        heads = {kernel, *nodes(kernel)}
        if parent in heads:
            return "nursery"
        with suppress(psutil.NoSuchProcess):
            # A rank's own children look like it: who was forked by the nursery itself is a rank.
            if psutil.Process(parent).ppid() in heads:
                return "rank"
        return "a rank's child"
    if "nbtrain node" in line:
        return "node"
    if "nbtrain.worker" in line:
        return "rank" if parent == kernel else "a rank's child"
    return "other"


def nodes(kernel: int) -> set[int]:
    """Processes by which this machine stands for several."""
    found = set()
    for process in psutil.Process(kernel).children():
        with suppress(psutil.NoSuchProcess):
            if "nbtrain node" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def _inside(pid: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    counts["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            counts[_kind(os.readlink(f"/proc/{pid}/fd/{entry}"))] += 1
    return counts


def _kind(target: str) -> str:
    """The sort of thing that a descriptor leads to."""
    for start, kind in (
        ("socket:", "sockets"),
        ("pipe:", "pipes"),
        ("/memfd:", "memory files"),
        ("anon_inode", "anon_inode"),
    ):
        if target.startswith(start):
            return kind
    return "devices" if target.startswith("/dev/") and not target.startswith("/dev/shm/") else "files"


def _below(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def _tree(folder: Path) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            found.append(str(path.relative_to(folder)))
    return found


def _shared_memory(pids: set[int]) -> list[str]:
    """Files in /dev/shm, which others use too: those that nobody else has open or mapped."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    if not names:
        return []
    for process in psutil.process_iter():
        if process.pid not in pids:
            with suppress(psutil.Error, OSError):
                names -= {name for name in names if name in Path(f"/proc/{process.pid}/maps").read_text()}
                names -= {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
    return sorted(names)
