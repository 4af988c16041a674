"""The private directory of a pool: sockets and the group's store lie in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

from nbtrain.errors import PoolError

LONGEST = 80
"""A socket's path may have about 100 bytes; the rest is for its name."""
ROOM = 1 << 16
"""Bytes that must be writable: the store and the sockets need less."""


def make() -> str:
    """A new directory that only this user can enter. Tries places until one is writable and has room."""
    reasons = []
    for base in _places():
        try:
            path = tempfile.mkdtemp(prefix="nbtrain-", dir=base)  # mode 0700
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            continue
        problem = _problem(path)
        if problem is None:
            return path
        reasons.append(f"{base}: {problem}")
        remove(path)
    raise PoolError(
        "there is no directory for the ranks' sockets: " + "; ".join(reasons) + ". "
        "Set XDG_RUNTIME_DIR or TMPDIR to one that is writable, has room and a short path"
    )


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _places() -> Iterator[str]:
    seen = set()
    for place in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd()):
        if place and place not in seen:
            seen.add(place)
            yield place


def _problem(path: str) -> str | None:
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
