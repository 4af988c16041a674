"""A checkpoint is a folder that is there whole, or not at all.

It is written under another name beside its place, synchronised, and moved there. One that is replaced is put aside
first and removed last. A process that is killed leaves either a folder that was cut short (removed by the next save)
or one that was put aside (`load` finds it, and the next save puts it back); what was there before is never harmed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

MARKER = "checkpoint.json"
_NUMBERS = itertools.count()
_OURS = re.compile(r"\.(?P<name>.+)\.(?P<host>\w+)-(?P<pid>\d+)-\d+\.(?P<what>tmp|old)")


def beside(place: Path) -> Path:
    """A new name for what is to become `place`."""
    return place.parent / f".{place.name}.{_host()}-{os.getpid()}-{next(_NUMBERS)}.tmp"


def marker(folder: Path) -> dict[str, Any] | None:
    """What a whole checkpoint says about itself; None: it is none, or some of it is missing."""
    try:
        said: dict[str, Any] = json.loads((folder / MARKER).read_text())
        if all((folder / name).stat().st_size == size for name, size in said["files"].items()):
            return said
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    return None


def mark(folder: Path, said: Mapping[str, Any]) -> None:
    """The last file of a checkpoint. It names the others, and how large they are."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    with open(folder / MARKER, "w") as out:
        json.dump({**said, "files": files}, out, indent=1)
        synchronise(out.fileno())
    synchronise_folder(folder)


def move(made: Path, place: Path) -> None:
    """`made` becomes `place`."""
    aside = None
    if os.path.lexists(place):  # of a link the link is replaced, and what it leads to is as it was
        aside = made.with_suffix(".old")
        os.rename(place, aside)
    try:
        os.rename(made, place)
    except OSError:
        if aside is not None:
            os.rename(aside, place)
        raise
    synchronise_folder(place.parent)
    if aside is not None:
        remove(aside)


def remove(folder: Path) -> None:
    """The marker goes first: what is half removed is not taken for whole."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def tidy(parent: Path, writing: tuple[Path, ...] = ()) -> None:
    """Remove what processes that are gone have left in `parent`. `writing`: of this process, not to be touched."""
    for path, found in _left(parent):
        if path in writing or not _over(found["host"], int(found["pid"])):
            continue
        place = parent / found["name"]
        if found["what"] == "old" and not place.exists() and marker(path) is not None:
            with contextlib.suppress(OSError):
                os.rename(path, place)
        else:
            remove(path)


def replaced_one(place: Path) -> Path | None:
    """A whole one that was put aside, when its place is empty: the process that replaced it was killed."""
    for path, found in _left(place.parent):
        if found["name"] == place.name and found["what"] == "old" and marker(path) is not None:
            return path
    return None


def inside(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The whole checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(path, said) for path in folder.iterdir() if path.name[:1] != "." and (said := marker(path)) is not None]
    return sorted(found, key=lambda pair: (pair[1].get("saved", 0), pair[0].name))


def at_intervals(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints that were made at intervals, without a call of `save`."""
    return [(path, said) for path, said in inside(folder) if re.fullmatch(r"step-\d+", path.name)]


def prune(folder: Path, keep: int, ours: Callable[[dict[str, Any]], bool]) -> None:
    """Of the checkpoints made at intervals that are `ours`, keep the newest ones."""
    steps = [path for path, said in at_intervals(folder) if ours(said)]
    for path in steps[: max(0, len(steps) - keep)]:
        remove(path)


def synchronise(file: int) -> None:
    os.fsync(file)


def synchronise_folder(folder: Path) -> None:
    """So that the names in it last. Not every file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _left(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    if not parent.is_dir():
        return []
    return [(path, found) for path in parent.iterdir() if (found := _OURS.fullmatch(path.name))]


def _over(host: str, pid: int) -> bool:
    """The process is gone, as far as can be known from here, or is this one."""
    return pid == os.getpid() or (host == _host() and not alive(pid))


def alive(pid: int) -> bool:
    """One that has ended, and that nobody has asked how, is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"
