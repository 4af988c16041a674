"""What a test may not leave behind, seen as a difference between two snapshots.

    before = Snapshot.take()
    ...the test...
    leaks = before.leaks()          # lines that name what is new; [] when the house is clean

What was there before the test (a kernel that a whole module shares, and that kernel's children) is
not the test's. Ends of processes and threads are waited for, because a well-behaved one needs a moment.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

OPS = Path.home() / ".cache" / "nbtrain" / "ops-of-tests"
"""Where all tests have what DeepSpeed compiles, which takes minutes; `.ci/ops` does it beforehand."""


def drop_left_locks() -> None:
    """torch waits for ever for the lock of a process that was killed while it compiled or loaded. One that is compiled
    takes minutes; so an older lock is nobody's."""
    for lock in OPS.glob("*/lock"):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime > 900:
                lock.unlink()


GRACE = 2.0
"""Seconds that processes and threads get to end: what nbtrain promises when a kernel dies."""

SESSION = "NBTRAIN_TEST_SESSION"
"""In the environment of every process a test starts, so that an orphan is still recognised as ours."""

KERNEL = "NBTRAIN_TEST_KERNEL"
"""In the environment of one kernel and of everything it starts."""

LIBRARIES_SET = ("KMP_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_NVML_", "PYTEST_", "COLUMNS", "LINES")
"""Environment variables that libraries set when they are imported."""

LIBRARIES_KEEP = ("TMonitor", "HistorySavingThread", "_DummyThread")
"""Classes of threads that live as long as the process, by design of tqdm, IPython and threading."""

EXECUTOR = "asyncio_"
"""How asyncio names the threads of an event loop's executor; loops that libraries keep have some."""

LIBRARY_FILES = ("torchinductor_", "matplotlib-", "pytest-of-", "playwright", "dconf")
"""What libraries keep below the temporary directory and remove, or use again, themselves."""

TEMPLATES = ["_remote_module_non_scriptable.py"]
"""What is in the directory that torch 2.8 and 2.9 make in every process that imports their compiler; the processes in
which that compiles leave theirs."""


def mark_session(of_its_own: bool) -> None:
    """Once, before the first test: give our descendants a mark. Workers of pytest-xdist have one each."""
    if of_its_own or SESSION not in os.environ:
        os.environ[SESSION] = uuid.uuid4().hex


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every live process that has name=value in the environment it was started with, orphans included."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            if _has_in_environment(pid, name, value) and alive(process := psutil.Process(pid)):
                found.append(process)
    return found


def _has_in_environment(pid: int, name: str, value: str) -> bool:
    """Twice for each test it is asked of every process there is: psutil takes five times as long."""
    if not sys.platform.startswith("linux"):
        return psutil.Process(pid).environ().get(name) == value
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"{name}={value}".encode() in file.read().split(b"\0")


def alive(process: psutil.Process) -> bool:
    """Running, and not merely waiting for a parent to read its exit code."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kernel_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):
        return process.environ().get(KERNEL)
    return None


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:120]})"
    return str(process.pid)


def gone_within(seconds: float, remaining: Callable[[], list[str]]) -> list[str]:
    """Call `remaining()` until it returns nothing; what it still returns after `seconds` is the answer."""
    deadline = time.monotonic() + seconds
    while True:
        left = remaining()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _descendants() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    mark = os.environ.get(SESSION, "")
    known = {child.pid for child in children}
    me = os.getpid()
    return children + [p for p in marked(SESSION, mark) if p.pid not in known and p.pid != me]


def _descriptors() -> dict[int, str]:
    found = {}
    with suppress(FileNotFoundError):  # no /proc: nothing to compare
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _files() -> set[str]:
    """Shared memory, and what is directly below the private temporary directory and the user's folder in it."""
    private = tempfile.gettempdir()
    meeting_place = f"{private}/nbtrain"  # kept, because several notebooks lease GPUs there; its files are not
    found = set()
    for folder in ("/dev/shm", private, meeting_place):
        with suppress(FileNotFoundError, NotADirectoryError):
            found |= {f"{folder}/{name}" for name in os.listdir(folder) if not name.startswith(LIBRARY_FILES)}
    return {path for path in found if not _of_templates(path)} - {meeting_place}


def _of_templates(path: str) -> bool:
    with suppress(OSError):
        return os.listdir(path) == TEMPLATES
    return False


def _held_by_others(path: str) -> bool:
    """A file in /dev/shm may be that of another test session on this machine: whoever maps it is its owner.

    It is known by its number: glibc maps a semaphore under a name that it gives up before the semaphore has its own.
    """
    try:
        file = os.stat(path)
    except OSError:
        return True  # nobody's any more
    if file.st_uid != os.getuid():
        return True
    mapped = f" {os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x} {file.st_ino} "
    mine = {p.pid for p in _descendants()} | {os.getpid()}
    for process in psutil.process_iter():
        if process.pid not in mine:
            with suppress(psutil.Error, OSError):
                if mapped in Path(f"/proc/{process.pid}/maps").read_text():
                    return True
                if any(os.path.samestat(os.stat(fd), file) for fd in Path(f"/proc/{process.pid}/fd").iterdir()):
                    return True
    return False


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(LIBRARIES_SET)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What there is now, and, later, what is there too."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]
    files: frozenset[str]
    environment: dict[str, str]
    path: tuple[str, ...]
    directory: str
    handlers: dict[int, object]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            processes=frozenset(_descendants()), threads=frozenset(threading.enumerate()), descriptors=_descriptors(),
            files=frozenset(_files()), environment=_environment(), path=tuple(sys.path), directory=os.getcwd(),
            handlers={number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        )  # fmt: skip

    def leaks(self) -> list[str]:
        found = gone_within(GRACE, self._new_processes) + gone_within(GRACE, self._new_threads)
        if self._new_descriptors():
            gc.collect()  # what only a cycle kept open is not a leak
        found += gone_within(GRACE, self._new_descriptors) + gone_within(GRACE, self._new_files)
        return found + self._changed_settings()

    def restore(self) -> None:
        """Put back what a leaking test changed, so that it fails alone."""
        for name in _environment().keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        sys.path[:] = self.path
        os.chdir(self.directory)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for process in self._strangers():
            with suppress(psutil.Error):
                process.kill()

    def _strangers(self) -> list[psutil.Process]:
        """New processes, without those that something older than the test has started."""
        background = set(self.processes)
        kernels = {_kernel_of(process) for process in background} - {None}
        new = []
        for process in _descendants():
            with suppress(psutil.Error):
                known = process in background or not background.isdisjoint(process.parents())
                # A rank's guard outlives its parent, but not its kernel.
                if not known and alive(process) and _kernel_of(process) not in kernels:
                    new.append(process)
        return new

    def _new_processes(self) -> list[str]:
        return [f"process {describe(process)}" for process in self._strangers()]

    def _new_threads(self) -> list[str]:
        return [
            f"thread {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in self.threads
            and not type(thread).__name__.endswith(LIBRARIES_KEEP)
            and not thread.name.startswith(EXECUTOR)
        ]

    def _new_descriptors(self) -> list[str]:
        # Event and epoll descriptors belong to event loops that libraries keep; they lead nowhere else.
        harmless = (
            "anon_inode:[event",
            "/dev/null",
            "/dev/nvidia",
            "/memfd:nbtrain-proof",
            "/dev/urandom",
            "/proc/",
            "/sys/",
        )
        return [
            f"open file {number} → {target}"
            for number, target in _descriptors().items()
            if self.descriptors.get(number) != target and not target.startswith(harmless)
        ]

    def _new_files(self) -> list[str]:
        new = sorted(_files() - self.files)
        return [f"file {path}" for path in new if not (path.startswith("/dev/shm/") and _held_by_others(path))]

    def _changed_settings(self) -> list[str]:
        then, now = self.environment, _environment()
        names = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        found = [f"environment variable {name}: {then.get(name)!r} → {now.get(name)!r}" for name in names]
        if tuple(sys.path) != self.path:
            found.append(f"sys.path: {sorted(set(sys.path) ^ set(self.path)) or 'its order'}")
        if os.getcwd() != self.directory:
            found.append(f"working directory: {self.directory} → {os.getcwd()}")
        found += [
            f"handler of {signal.Signals(number).name}: {old} → {signal.getsignal(number)}"
            for number, old in self.handlers.items()
            if signal.getsignal(number) != old
        ]
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            found.append("the default process group of torch.distributed")
            distributed.destroy_process_group()
        return found
