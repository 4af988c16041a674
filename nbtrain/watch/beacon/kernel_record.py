"""Writes and reads the file that says where a kernel listens: `nbtrain/<kernel id>.json` beside its connection file.

Only a regular file of this user that nobody else can read is trusted.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROTOCOL = 1
LONGEST = 4096
"""Bytes of such a file; more are not read."""
KERNEL_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")
"""Jupyter Server's are UUIDs, other programs' have a few more letters; nothing that a path could be made of."""
FOLDER = "nbtrain"
ELSEWHERE = "nbtrain-"
"""Prefix of temporary folders for sockets, made where the path of that folder is too long for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeaconRecord:
    """What the file of one kernel says."""

    kernel_id: str
    pid: int
    socket: str
    host: str
    """a home directory may be seen from many machines"""
    boot: str
    """where `pid` means this process: a start of the machine, and a container on it"""
    protocol: int = PROTOCOL

    @classmethod
    def mine(cls, kernel_id: str, socket: str) -> BeaconRecord:
        return cls(kernel_id=kernel_id, pid=os.getpid(), socket=socket, host=platform.node(), boot=boot())

    @classmethod
    def read(cls, folder: Path, kernel_id: str) -> BeaconRecord | None:
        """The record in the file; None if there is no valid one."""
        if not KERNEL_ID.fullmatch(kernel_id) or not _is_ours(folder):
            return None
        try:
            # A link is not followed, and a pipe is not waited for.
            fd = os.open(folder / f"{kernel_id}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or not _private(status):
                    return None
                said = json.loads(os.read(fd, LONGEST))
            finally:
                os.close(fd)
        except (OSError, ValueError, RecursionError):
            return None
        record = cls._from(said)
        return record if record is not None and record.kernel_id == kernel_id else None

    @classmethod
    def _from(cls, said: Any) -> BeaconRecord | None:
        if not isinstance(said, dict) or any(type(said.get(name)) is not kind for name, kind in _FIELDS.items()):
            return None
        record = cls(**{name: said[name] for name in _FIELDS})
        right = record.protocol == PROTOCOL and record.pid > 1 and os.path.isabs(record.socket)
        return record if right else None

    def write(self, folder: Path) -> None:
        """Replace the file atomically."""
        new = folder / f".{self.kernel_id}.{self.pid}"
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(asdict(self), file)
        os.replace(new, folder / f"{self.kernel_id}.json")

    def remove(self, folder: Path) -> None:
        """Remove the file, if it is still this one, and the socket."""
        if BeaconRecord.read(folder, self.kernel_id) == self:
            (folder / f"{self.kernel_id}.json").unlink(missing_ok=True)
        path = Path(self.socket)
        with suppress(OSError):
            if path.parent == folder or path.parent.name.startswith(ELSEWHERE):
                if self.listens:
                    path.unlink()
                if path.parent != folder:
                    path.parent.rmdir()

    @property
    def elsewhere(self) -> bool:
        """Whether the kernel runs on another machine, where its process cannot be checked."""
        return self.host != platform.node()

    @property
    def alive(self) -> bool:
        """Whether its kernel lives."""
        if self.elsewhere or self.boot != boot():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # the number is another user's by now
            return False
        return self.listens

    @property
    def listens(self) -> bool:
        """Whether a socket of this user is at its path."""
        try:
            status = os.lstat(self.socket)
        except OSError:
            return False
        return stat.S_ISSOCK(status.st_mode) and _private(status)


_FIELDS: dict[str, type] = {"kernel_id": str, "pid": int, "socket": str, "host": str, "boot": str, "protocol": int}


def records(folder: Path) -> Iterator[BeaconRecord]:
    """Records of the kernels that live; those of dead ones are removed."""
    for path in sorted(folder.glob("*.json")):
        record = BeaconRecord.read(folder, path.stem)
        if record is None or record.elsewhere:
            continue
        if record.alive:
            yield record
        else:
            with suppress(OSError):
                record.remove(folder)


def make_folder(beside: Path) -> Path:
    """The folder for records; OSError if it cannot be private to this user."""
    folder = beside / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} is not a directory of this user")
    folder.chmod(0o700)
    return folder


def here() -> tuple[str, Path] | None:
    """This kernel's id and the folder of its connection file; None where there is no kernel."""
    kernels = sys.modules.get("ipykernel.kernelapp")
    if kernels is None or not kernels.IPKernelApp.initialized():
        return None
    from ipykernel.connect import get_connection_file

    try:
        path = Path(get_connection_file()).absolute()
    except OSError:  # somebody has removed it
        return None
    kernel_id = path.stem.removeprefix("kernel-")
    return (kernel_id, path.parent) if KERNEL_ID.fullmatch(kernel_id) else None


def boot() -> str:
    parts = []
    with suppress(OSError):  # no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _is_ours(folder: Path) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077
