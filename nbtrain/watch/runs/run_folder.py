"""The folder of past runs: one file per run; the oldest are deleted when there are many.

Several notebooks write there at once. A number is taken by creating its file, and the process that writes a file holds
a lock on it, which ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

RUNS = 200
"""runs that are kept, at most"""
TOTAL = 400_000_000
"""bytes that are kept, at most"""
_NAME = re.compile(r"(\d{5,})\.jsonl")
_PROCESS = uuid.uuid4().hex


def folder() -> Path | None:
    """The folder. None: no runs are kept (`NBTRAIN_HISTORY=off`)."""
    named = os.environ.get("NBTRAIN_HISTORY", "")
    if named.strip().lower() == "off":
        return None
    if named:
        return Path(os.path.abspath(os.path.expanduser(named)))
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share") / "nbtrain" / "history"


def files(where: Path) -> list[tuple[int, Path]]:
    """(number, file), the oldest first."""
    try:
        with os.scandir(where) as there:  # a pipe of that name would be waited for
            names = [entry.name for entry in there if _NAME.fullmatch(entry.name) and entry.is_file()]
    except OSError:
        return []
    return sorted((int(name.partition(".")[0]), where / name) for name in names)


def file(where: Path, number: int) -> Path:
    """The file of a run, which may not be there."""
    return where / f"{number:05}.jsonl"


def create(where: Path) -> tuple[Path, int]:
    """Create a run's file, locked and open for appending, and delete old ones to make room for it."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = files(where)
    _make_room(there)
    number = there[-1][0] + 1 if there else 1
    while True:
        path = file(where, number)
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:  # another notebook was faster
            number += 1
            continue
        _lock(opened, fcntl.LOCK_EX)
        return path, opened


def release(file: int) -> None:
    """Close the file and release its lock, also where a forked child has the file open."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def is_written(path: Path) -> bool:
    """Whether a process is writing the run."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH)  # others may ask at the same time
    finally:
        os.close(file)


def notebook(namespace: Mapping[str, Any]) -> str:
    """The notebook's path; empty where it is not known."""
    return str(namespace.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", ""))


def kernel() -> str:
    """The kernel's id, which outlives a restart; for a plain process a unique one."""
    module = sys.modules.get("ipykernel.kernelapp")
    app = module.IPKernelApp if module is not None else None
    if app is None or not app.initialized():
        return _PROCESS
    # The id that the server's page uses; programs that run notebooks name the connection file differently.
    return Path(app.instance().connection_file).stem.removeprefix("kernel-") or _PROCESS


def _lock(file: int, kind: int) -> bool:
    """Whether the lock was free; also True where the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _make_room(there: list[tuple[int, Path]]) -> None:
    """Delete the oldest files until one more fits."""
    sizes = dict(_sizes(there))
    count, total = len(sizes) + 1, sum(sizes.values())
    for path, size in sizes.items():
        if count <= RUNS and total <= TOTAL:
            return
        if is_written(path):
            continue
        with suppress(OSError):
            path.unlink()
            count, total = count - 1, total - size


def _sizes(there: list[tuple[int, Path]]) -> Iterator[tuple[Path, int]]:
    for _, path in there:
        with suppress(OSError):
            yield path, path.stat().st_size
