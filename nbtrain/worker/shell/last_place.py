"""Notes where the cell is, for the case that nothing else can be said: a SIGKILL leaves no traceback.

The file is the kernel's and is in memory, so it outlives the process.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import islice

from nbtrain.compat.python import frames_of

DEEP = 64
"""calls that are noted, the innermost first"""


class LastPlace:
    """The calls of the main thread, noted by another thread while a cell runs."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._main = threading.main_thread().ident
        self.noted = False

    def clear(self) -> None:
        """No cell runs: where the last one was is no longer true."""
        self.noted = False
        with suppress(OSError):
            os.ftruncate(self._fd, 0)

    def note(self) -> None:
        self.noted = True
        with frames_of(self._main) as frames:
            calls = [
                f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
                for frame in islice(frames, DEEP)
            ]
        # One write, as the process may end at any moment; what an earlier, longer note had comes behind the zero.
        with suppress(OSError):  # a full disk is no reason to stop what else this thread does
            os.pwrite(self._fd, "".join(calls).encode("utf-8", "replace") + b"\0", 0)
