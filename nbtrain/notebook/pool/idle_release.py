"""Ends ranks on GPUs that nobody has used for a while, so that others can have the cards.

Nothing is lost: after every cell the notebook has what the ranks had. Where something lives on the ranks only
(the notebook holds a handle for it), they stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MINUTES = 30


class IdleRelease:
    """A timer that runs between cells."""

    def __init__(
        self, release: Callable[[], bool], seconds: float = MINUTES * 60, after: Callable[[], None] = lambda: None
    ) -> None:
        """`release` ends the ranks and returns whether it did. It is called from the timer's thread, so it must not
        touch the pool's sockets. `after` is called when it did, from the same thread."""
        self.released = False
        self._release = release
        self._after = after
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._deciding = threading.Lock()

    def start(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._over)
        self._timer.args = [self._timer]
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """From now on the ranks are not ended; `released` says whether they were before."""
        with self._deciding:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join(0.5)

    def _over(self, timer: threading.Timer) -> None:
        with self._deciding:
            if self._timer is not timer:
                return  # a cell had begun while this thread was waking up
            self.released = self._release()
        if self.released:
            self._after()
