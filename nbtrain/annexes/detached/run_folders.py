"""The folders of detached runs: what each is, whether it goes on, and what became of it.

    run.json     what it is
    lock         held by the keeper for as long as it lives; its process, and what it waits for
    log          what the keeper's own process says
    figures      how far it is, or was at last (watch/feed)
    output.*     what the run has printed (output_log.py)
    sent.json    digests of what the kernel has sent, and has under names that the run binds (digests.py)
    result       what the run has changed and made (result_file.py)
    random       where it has left the random generators
    place        where its loops were when it was stopped
    end.json     how it ended, and its last words; written last
    taken.json   who has taken the result home
    gone_on.json which run goes on where it has ended

Folders are this user's alone; links and what belongs to others are passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.watch.beacon.kernel_record import boot

ABOUT, LOCK, LOG, END, TAKEN = "run.json", "lock", "log", "end.json", "taken.json"
FIGURES, RANDOM, PLACE, GONE_ON = "figures", "random", "place", "gone_on.json"
GOES_ON = "running"
LINE = 500
"""Bytes of a note."""
started_here: set[tuple[Path, float]] = set()
"""the keys of runs that this kernel has started"""
_NAME = re.compile(r"\d{4,}")


def place() -> Path:
    """Where the folders are."""
    if named := os.environ.get("NBTRAIN_RUNS", ""):
        return Path(os.path.abspath(os.path.expanduser(named)))
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share") / "nbtrain" / "runs"


def versions() -> str:
    """Those that what a run has left opens in: of Python for functions and classes, of nbtrain for the rest."""
    return f"Python {sys.version_info[0]}.{sys.version_info[1]} and nbtrain {sys.modules['nbtrain'].__version__}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run."""

    path: Path

    @classmethod
    def make(cls, about: Mapping[str, Any], where: Path) -> RunFolder:
        """A folder there for a run that is about to start, under the next number."""
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(where):
            raise UsageError(
                f"{where} is not a folder of yours alone: chmod 700 it, or set NBTRAIN_RUNS to one that is"
            )
        number = max((run.number for run in every_run(where)), default=0) + 1
        while True:
            made = cls(where / f"{number:04}")
            try:
                made.path.mkdir(mode=0o700)
            except FileExistsError:  # another notebook was faster
                number += 1
                continue
            made.write(ABOUT, {**about, "began": time.time(), "versions": versions(), "boot": boot()})
            return made

    @property
    def number(self) -> int:
        return int(self.path.name)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Whole or not at all, also where the machine is switched off."""
        self.put(name, json.dumps(dict(content)).encode(), lasting=True)

    def put(self, name: str, content: bytes, *, lasting: bool = False) -> None:
        """Whole or not at all. `lasting`: it must be on the disk."""
        new = self.path / f".{name}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(fd)
        os.replace(new, self.path / name)

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            said = json.loads(self.get(name))
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def get(self, name: str) -> bytes:
        with open(os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()

    @property
    def about(self) -> dict[str, Any]:
        return self.read(ABOUT) or {}

    @property
    def end(self) -> dict[str, Any] | None:
        return self.read(END)

    @property
    def key(self) -> tuple[Path, float]:
        """Which run it is: numbers are given again."""
        return self.path, float(self.about.get("began", 0))

    @property
    def state(self) -> str:
        """`running`; how it ended: `done`, `stopped`, `killed`, `failed`; or `lost`, with its keeper."""
        if (end := self.end) is not None:
            return str(end.get("how", "lost"))
        return GOES_ON if self.is_kept else "lost"

    @property
    def is_kept(self) -> bool:
        """Whether its keeper lives."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @property
    def last_sign(self) -> float:
        """When it noted last how far it is, in seconds since the epoch; 0: never."""
        try:
            return (self.path / FIGURES).lstat().st_mtime
        except OSError:
            return 0.0

    def hold(self) -> int:
        """Take the lock, for as long as this process lives. Returns its descriptor."""
        fd = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """One at a time, of all notebooks: the next waits."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def waits(self, why: str) -> None:
        """Note what its keeper waits for. In place: there is no room for a new file."""
        with suppress(OSError), open(self.path / LOCK, "r+b") as file:
            file.readline()
            file.write(why.encode()[:LINE])
            file.truncate()

    @property
    def waits_for(self) -> str:
        """Room, once it has ended; empty: nothing."""
        try:
            return self.get(LOCK).decode(errors="replace").partition("\n")[2] if self.is_kept else ""
        except OSError:
            return ""

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        total = 0
        for path in self.path.rglob("*"):  # also what it has saved for who asks
            with suppress(OSError):
                total += path.lstat().st_size
        return total

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def __str__(self) -> str:
        about = self.about
        return f"run {self.number}: {about.get('line') or about.get('strategy', '')}".rstrip(": ")


def every_run(where: Path | None = None) -> list[RunFolder]:
    """The oldest first."""
    where = where or place()
    try:
        names = sorted((name for name in os.listdir(where) if _NAME.fullmatch(name)), key=int)
    except OSError:
        return []
    return [RunFolder(where / name) for name in names if _is_private(where / name)]


def find(word: str) -> RunFolder:
    """The run of this number; without one the newest."""
    runs = every_run()
    if not word:
        if not runs:
            raise UsageError("there is no detached run: %%distributed --detach starts one")
        return runs[-1]
    known = {run.number: run for run in runs}
    if not word.isdecimal() or int(word) not in known:
        there = f"there are {', '.join(map(str, known))}" if known else "there is none"
        raise UsageError(f"there is no detached run {word}; {there}")
    return known[int(word)]


def _is_private(folder: Path) -> bool:
    """A folder, no link, of this user alone."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
