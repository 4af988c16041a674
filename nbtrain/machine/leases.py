"""Leases cards, so that two notebooks of one user do not both take the same.

A lease is a locked file, one a card, in a directory private to the user. The lock goes with the process that
holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from nbtrain.base.errors import DeviceError


class Lease:
    """Cards that this process keeps for its ranks: one locked file per card, which other notebooks of the user see.

    The system drops the lock when the process dies, however it dies. Several leases of one process may
    name the same card; it is free when the last of them is closed. One that is dropped is closed too.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = _lease_directory() if directory is None else directory
        self._paths: list[Path] = []
        self._finalizer = weakref.finalize(self, _let_go, self._paths)

    def close(self) -> None:
        """Give the cards back; again does nothing."""
        self._finalizer()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def held_here(self, uuid: str) -> bool:
        """Whether this process has the card already, through any lease."""
        lease = _HELD.get(self._path(uuid))
        return lease is not None and lease.pid == os.getpid()

    def add(self, uuid: str) -> bool:
        """Lease one more card; False: another process has it."""
        path = self._path(uuid)
        with _GUARD:
            lease = _HELD.get(path)
            if lease is None or lease.pid != os.getpid():  # a fork has its parent's table, not its leases
                file = _lock(path)
                if file is None:
                    return False
                lease = _HELD[path] = _Held(file, os.getpid())
            lease.count += 1
        self._paths.append(path)
        return True

    def holder(self, uuid: str) -> int | None:
        """The process that has the card, as far as it can be told."""
        try:
            return int(self._path(uuid).read_text())
        except (OSError, ValueError):
            return None

    def _path(self, uuid: str) -> Path:
        return self.directory / (re.sub(r"[^\w-]", "_", uuid) + ".lease")


@dataclass(slots=True)
class _Held:
    file: int
    pid: int
    count: int = 0


_HELD: dict[Path, _Held] = {}
"""Locks belong to open files, not to processes: a second open file here would not get the lock."""
_GUARD = threading.RLock()  # a collection may close a dropped lease while another is being made


def _let_go(paths: list[Path]) -> None:
    with _GUARD:
        while paths:
            path = paths.pop()
            lease = _HELD.get(path)
            if lease is None or lease.pid != os.getpid():
                continue
            lease.count -= 1
            if lease.count == 0:
                del _HELD[path]
                path.unlink(missing_ok=True)
                fcntl.flock(lease.file, fcntl.LOCK_UN)  # also where a child that was forked has the file open
                os.close(lease.file)


def _lock(path: Path) -> int | None:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who let go in the meantime has removed the file: a lock on it would be seen by nobody.
            if os.path.samestat(os.fstat(file), path.stat()):
                os.ftruncate(file, 0)
                os.write(file, b"%d\n" % os.getpid())
                file, kept = -1, file
                return kept
        except BlockingIOError:
            return None
        except FileNotFoundError:
            pass
        finally:
            if file >= 0:
                os.close(file)


def _lease_directory() -> Path:
    """A directory of the user's own; refused where somebody else could have prepared it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = (
        Path(runtime) / "nbtrain" if os.path.isdir(runtime) else Path(tempfile.gettempdir()) / f"nbtrain-{os.getuid()}"
    )
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"cannot lease GPUs: {error}; set TMPDIR to a directory that is yours") from None
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeviceError(
            f"cannot lease GPUs: {path} is not a private directory of yours (it should be, with mode 0700); "
            "remove it, or set TMPDIR to a directory that is yours"
        )
    return path
