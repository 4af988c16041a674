"""Says in words that a disk is full, of which torch says only `unexpected pos 832 vs 726`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from nbtrain.humanize import size

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OF_TORCH = "inline_container.cc"
"""what writes torch's files, where it says that a write has failed"""


@contextmanager
def room_told(path: str) -> Iterator[None]:
    """Around the writing of one file; where there was no room for it, that is the error."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) not in NO_ROOM and OF_TORCH not in str(error):
            raise
        said = f"there is no room for it ({_left(path)} left on this disk): make room, or write somewhere else"
        raise OSError(errno.ENOSPC, said, path) from error


def _left(path: str) -> str:
    """Asked while what was written so far is still there. A quota may leave less."""
    try:
        return f"{size(shutil.disk_usage(os.path.dirname(path) or '.').free)} are"
    except OSError:
        return "nothing is"
