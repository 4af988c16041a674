"""Ranks on GPUs that nobody has used for a while end, so that others can have the cards.

Nothing is lost: after every cell the notebook has what the ranks had. Where something lives on the ranks only
(the notebook holds a handle for it), they stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MINUTES = 30


class Idle:
    """A clock that runs between cells."""

    def __init__(self, release: Callable[[], bool], seconds: float = MINUTES * 60) -> None:
        """`release` says whether the ranks were ended. It is called from the clock's own thread: it must not touch the
        pool's sockets."""
        self.released = False
        self._release = release
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._over)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join(0.5)
            self._timer = None

    def _over(self) -> None:
        self.released = self._release()
