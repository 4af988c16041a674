"""What a rank does when it is told to end its cell."""

from __future__ import annotations

import signal
import time
from typing import Any


class Interrupts:
    """An interrupt is for the cell that had been sent when it came, however far the rank was with that cell: one that
    comes before its first line ends it at its first line, and one that comes after its last line ends nothing."""

    def __init__(self) -> None:
        self._listening = False
        self._came = 0.0
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, *_: Any) -> None:
        if self._listening:
            raise KeyboardInterrupt
        self._came = time.monotonic()

    def listen(self, since: float) -> None:
        """From here on an interrupt is raised; also one that came after `since`, by the clock of this machine."""
        self._listening = True
        if self._came >= since:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        self._listening = False
        signal.signal(signal.SIGINT, self._hear)  # a cell may have put a handler of its own here
