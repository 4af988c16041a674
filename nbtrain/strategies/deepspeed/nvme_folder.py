"""The folder of what is offloaded to a disk: one per engine and process, deleted when nobody needs it any more.

DeepSpeed leaves its files behind. Here they go when the engine does, at the latest when the process ends; what a killed
one has left is swept by the next engine that uses the same place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from nbtrain.errors import UsageError

_PREFIX = "nbtrain-"


class NvmeFolder:
    def __init__(self, place: str) -> None:
        try:
            os.makedirs(place, exist_ok=True)
            _sweep(Path(place))
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place)
        except OSError as error:
            raise UsageError(f"--nvme-path {place}: {error.strerror}") from None
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def close(self) -> None:
        self._finalizer()


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child's business
        shutil.rmtree(path, ignore_errors=True)


def _sweep(place: Path) -> None:
    for left in place.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(ValueError, IndexError):
            owner = int(left.name.split("-")[1])
            if not _alive(owner):
                shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
