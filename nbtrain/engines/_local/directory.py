"""Makes the private directory of a pool, for its sockets, and removes those that killed kernels left behind.

The process that makes one holds a lock on it, which the system releases when that process ends, however it ends. So
a directory without a lock is known to be abandoned, also in another container with the same `/tmp`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from nbtrain.base.errors import PoolError
from nbtrain.worker.process.rank_channel import address

LONGEST = 80
"""A socket's path may have about 100 bytes; the rest is for its name."""
ROOM = 1 << 16
"""Bytes that must be writable: sockets need less, but libraries that ranks import look for room themselves."""
PREFIX = "nbtrain-"
_locks: dict[str, int] = {}
"""directory of this process → descriptor that holds its lock"""


def make() -> str:
    """A new directory that only this user can enter. Tries places until one is writable and has room."""
    sweep()
    reasons = []
    for base in _places():
        try:
            if (danger := _danger(base)) is not None:
                reasons.append(f"{base}: {danger}")
                continue
            path = tempfile.mkdtemp(prefix=PREFIX, dir=base)  # mode 0700, a name nobody can foresee
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            continue
        problem = _problem(path)
        if problem is None:
            _locks[path] = descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with suppress(OSError):  # not every file system has locks; then nobody else clears it away
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path
        reasons.append(f"{base}: {problem}")
        remove(path)
    raise PoolError(
        "there is no directory for the ranks' sockets: " + "; ".join(reasons) + ". "
        "Set XDG_RUNTIME_DIR or TMPDIR to one that is yours, is writable, has room and a short path"
    )


def mark(path: str) -> None:
    """Have it known as a pool's, also where no rank connects to a socket in it."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(address(path))


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if (lock := _locks.pop(path, None)) is not None:
        os.close(lock)


def sweep() -> None:
    """Remove directories of killed kernels. The working directory, which may hold a million files, is not searched."""
    for base in _temporary():
        with suppress(OSError):
            for name in os.listdir(base):
                path = os.path.join(base, name)
                if name.startswith(PREFIX) and path not in _locks and _is_left(path):
                    shutil.rmtree(path, ignore_errors=True)


def _is_left(path: str) -> bool:
    """Whether it is a pool's directory that no process has locked. A pool makes its socket after its lock."""
    try:
        if os.lstat(path).st_uid != os.geteuid() or not stat.S_ISSOCK(os.lstat(address(path)).st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _places() -> Iterator[str]:
    yield from (first := _temporary())
    with suppress(FileNotFoundError):  # it was deleted under the notebook
        yield from {os.getcwd()}.difference(first)


def _temporary() -> list[str]:
    places = (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp")
    return list(dict.fromkeys(os.path.abspath(place) for place in places if place))


def _danger(base: str) -> str | None:
    """Why another user could replace a directory that is made here; None where none could."""
    status = os.stat(base)
    if status.st_uid not in (os.geteuid(), 0, _stranger()):
        return f"it belongs to another user (number {status.st_uid})"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "every user may rename what lies in it (it has no sticky bit)"
    return None


def _stranger() -> int:
    """The user that files of unknown users, /tmp among them, seem to belong to in a container; 0 if there is none."""
    try:
        with open("/proc/self/uid_map") as table, open("/proc/sys/kernel/overflowuid") as number:
            everybody_is_known = table.read().split() == ["0", "0", str((1 << 32) - 1)]
            return 0 if everybody_is_known else int(number.read())
    except OSError:  # not on Linux
        return 0


def _problem(path: str) -> str | None:
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return "what is made there is not this user's alone"
    if len(os.fsencode(path)) > LONGEST:
        return "its path is too long for a socket"
    probe = os.path.join(path, "probe")
    try:
        with open(probe, "wb") as file:
            file.write(bytes(ROOM))
        os.unlink(probe)
    except OSError as error:
        return error.strerror or str(error)
    return None


def unnamed() -> BinaryIO:
    """An unnamed file for the output of starting processes; in memory on Linux, since disks may be full."""
    if sys.platform == "linux":
        fd = os.memfd_create("nbtrain-starting", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # Linux makes it for everybody
        return open(fd, "w+b", buffering=0)
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))
