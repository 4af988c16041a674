"""A checkpoint is a folder that is there whole, or not at all.

It is written under another name beside its place, synchronised, and moved there. One that is replaced is put aside
first and removed last. A process that is killed leaves either a folder that was cut short (removed by the next save)
or one that was put aside (`load` finds it, and the next save puts it back); what was there before is never harmed.

A training neither replaces nor removes the checkpoints of another one. It is known by the names of its models and the
shapes in them: these are the same after the kernel was started anew, under another strategy and on other ranks. Two
cells are of one training if they have a model in common, and what they have in common is alike.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nbtrain.base.errors import UsageError
from nbtrain.base.humanize import size
from nbtrain.worker.checkpoints.content import Content, TensorInfo

ANSWER = "aside-"
MARKER = "checkpoint.json"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TORCH_WRITER = "inline_container.cc"
"""the file of torch's that a failed write names, beside `unexpected pos 832 vs 726` alone"""
Trained = Mapping[str, Sequence[str]]
"""name of a model → hashes of the shapes of all that are called so"""
_NUMBERS = itertools.count()
_OURS = re.compile(r"\.(?P<name>.+)\.(?P<host>\w+)-(?P<pid>\d+)-\d+\.(?P<what>tmp|old)")


def beside(place: Path) -> Path:
    """A new name for what is to become `place`."""
    return place.parent / f".{place.name}.{_host()}-{os.getpid()}-{next(_NUMBERS)}.tmp"


def marker(folder: Path) -> dict[str, Any] | None:
    """What a whole checkpoint says about itself; None: it is none, or some of it is missing."""
    try:
        if not (folder / MARKER).is_file():  # another's pipe of that name would be waited for
            return None
        said: dict[str, Any] = json.loads((folder / MARKER).read_text())
        complete = all((folder / name).stat().st_size == length for name, length in said["files"].items())
        if complete and all(isinstance(said.get(key, 0), (int, float)) for key in ("format", "number", "saved")):
            return said
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    return None


def mark(folder: Path, said: Mapping[str, Any]) -> None:
    """Write the last file of a checkpoint, which names the others and how large they are. Its number is larger than all
    in the folder that it comes into: clocks go back, and those of machines differ."""
    number = 1 + last_number(inside(folder.parent))
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    with open(folder / MARKER, "w") as out:
        json.dump({**said, "number": number, "files": files}, out, indent=1)
        os.fsync(out.fileno())
    synchronise_folder(folder)


def move(made: Path, place: Path) -> None:
    """Put the folder `made` in the place of what is at `place`."""
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


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[bool]:
    """Who asks whether it is `in_use` leaves it there meanwhile. False: it is gone already, or not whole."""
    try:
        fd = os.open(folder / MARKER, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield marker(folder) is not None
    finally:
        os.close(fd)


def in_use(folder: Path) -> bool:
    """Whether another process is `reading` it."""
    try:
        fd = os.open(folder / MARKER, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove(folder: Path) -> None:
    """Remove a checkpoint. Its marker goes first, so that what is half removed is not taken for whole."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def tidy(parent: Path) -> None:
    """Remove from `parent` what processes that are gone, as far as can be known from here, or this one have left."""
    for path, match in _left(parent):
        pid = int(match["pid"])
        if pid != os.getpid() and (match["host"] != _host() or alive(pid)):
            continue
        place = parent / match["name"]
        if match["what"] == "old" and not place.exists() and marker(path) is not None:
            with contextlib.suppress(OSError):
                os.rename(path, place)
        else:
            remove(path)


def replaced_one(place: Path) -> Path | None:
    """A whole checkpoint that was put aside by a process that was killed before it put another in this place."""
    for path, match in _left(place.parent):
        if match["name"] == place.name and match["what"] == "old" and marker(path) is not None:
            return path
    return None


def inside(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The whole checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:  # which tells folders from files, of which there may be many, without a call
        places = [folder / entry.name for entry in entries if entry.name[:1] != "." and entry.is_dir()]
    checkpoints = [(path, said) for path in places if (said := marker(path)) is not None]
    return sorted(checkpoints, key=lambda pair: (_number(pair[1]), pair[1].get("saved", 0), pair[0].name))


def last_number(checkpoints: Iterable[tuple[Path, Mapping[str, Any]]]) -> int:
    """The number of the newest of these; 0 if there is none, or none has a number."""
    return max((_number(said) for _, said in checkpoints), default=0)


def _number(said: Mapping[str, Any]) -> int:
    number = said.get("number")
    return number if type(number) is int else 0


def at_intervals(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints that were made at intervals, without a call of `save`."""
    return [(path, said) for path, said in inside(folder) if re.fullmatch(r"step-\d+", path.name)]


def prune(folder: Path, keep: int, mine: Trained) -> None:
    """Of this training's checkpoints that were made at intervals, keep the newest ones."""
    steps = [path for path, said in at_intervals(folder) if same_training(mine, said)]
    for path in steps[: max(0, len(steps) - keep)]:
        remove(path)


# --- whose it is ---------------------------------------------------------------------------------


def trained(content: Content, described: Mapping[str, TensorInfo]) -> Trained:
    """What the marker says of the training, to know it by."""
    digests: dict[str, list[str]] = {}
    tables = [(name, described_object["tensors"]) for name, described_object in content.tree["modules"].items()]
    tables += [(name, one["loose"]) for name, one in content.tree["optimizers"].items() if one["loose"]]
    for name, tensors in tables or [(name, {}) for kind in content.tree.values() for name in kind]:
        shapes = sorted((path, described[key].shape) for path, key in tensors.items())
        kind, made_in_the_cell, _ = name.partition("#")  # a number there counts what the cell has made
        digests.setdefault(kind + made_in_the_cell, []).append(hashlib.sha256(repr(shapes).encode()).hexdigest()[:16])
    return digests


def same_training(mine: Trained, said: Mapping[str, Any]) -> bool:
    """Whether the checkpoint with this marker is of the same training."""
    theirs: Trained = said.get("trains") or {}
    common = mine.keys() & theirs.keys()
    return bool(common) and all(set(mine[name]) & set(theirs[name]) for name in common)


def refuse_anothers(to: Path, mine: Trained) -> None:
    """Raise if the folder of `--save-to` has checkpoints of another training."""
    for path, said in at_intervals(to):
        if not same_training(mine, said):
            raise UsageError(
                f"{to} has checkpoints of another training: {path.name} there holds {', '.join(said['holds'])}, and "
                f"the names or shapes of models are others here ({', '.join(mine)}). They would be replaced. Give this "
                f"training a folder of its own, as in --save-to {to.name}-2, or remove what is in there"
            )


# --- the disk ------------------------------------------------------------------------------------


@contextlib.contextmanager
def telling_of_a_full_disk(path: str) -> Iterator[None]:
    """Around the writing of a file: an error for want of room says so, and how much is left."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) not in NO_ROOM and TORCH_WRITER not in str(error):
            raise
        try:  # while what was written so far is still there; a quota may leave less
            left = f"{size(shutil.disk_usage(os.path.dirname(path) or '.').free)} are"
        except OSError:
            left = "nothing is"
        said = f"there is no room for it ({left} left on this disk): make room, or write somewhere else"
        raise OSError(errno.ENOSPC, said, path) from error


def synchronise_folder(folder: Path) -> None:
    """Make the names in a folder last. Not every file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _left(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    if not parent.is_dir():
        return []
    return [(path, match) for path in parent.iterdir() if (match := _OURS.fullmatch(path.name))]


def alive(pid: int) -> bool:
    """Whether the process runs. One that has ended, and that its parent has not waited for, does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"


def answer_to(directory: Path, request: int) -> Path:
    """Where the ranks save the weights that the notebook asks for while a run goes on in the background."""
    return directory / f"{ANSWER}{request}"
