"""Refuses two threads of a cell that train at the same time.

Ranks meet in their collectives one after the other, and threads take turns in another order on each rank: gradients of
different models would meet, or nobody come. A thread that trains while the cell's own waits for it is right, and so is
one of a pool, which stays when what it was given is done. What a thread of the cell's raises nobody may hear of, so it
is remembered: nothing trains any more, and the cell fails by it.
"""

from __future__ import annotations

import threading

from nbtrain.base.errors import NotSupported
from nbtrain.compat.python import frames_of

SEVERAL = (
    "rank {}: two threads of the cell train at the same time, and ranks would meet in another order than each other: "
    "train one model after the other in the cell's own thread, or start the next thread when the one before has ended"
)
POOLS = {"threading", "concurrent", "multiprocessing", "asyncio", "queue", "selectors", "weakref"}
"""Packages whose calls alone a thread of a pool is in, from the end of what it was given to the next."""


def _is_busy(thread: threading.Thread | None) -> bool:
    """Whether it is within something that it was given to do."""
    if thread is None or not thread.is_alive():  # then another one may have its number
        return False
    with frames_of(thread.ident) as frames:
        return any(frame.f_globals.get("__name__", "").partition(".")[0] not in POOLS for frame in frames)


class TrainingThreads:
    """Which thread of the cell trains. `begin` before each cell."""

    def __init__(self, rank: int, several: bool) -> None:
        """`several`: whether there are ranks to meet."""
        self.rank, self.several = rank, several
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        self.refused: NotSupported | None = None
        self.known = threading.get_ident()
        self._last: threading.Thread | None = None

    def enter(self) -> None:
        """A backward begins, or an optimizer steps. Raises in the second of two threads, and in both from then on."""
        if threading.get_ident() != self.known:
            self._changed()
        self.check()

    def check(self) -> None:
        if self.refused is not None:
            raise NotSupported(*self.refused.args)

    def remembered(self, refusal: NotSupported) -> NotSupported:
        """The same, which the cell fails by: a thread of it may have raised it, or the cell may catch it."""
        self.refused = self.refused or refusal
        return refusal

    def _changed(self) -> None:
        with self._lock:
            last, self._last, self.known = self._last, threading.current_thread(), threading.get_ident()
            if self.several and last is not threading.main_thread() and _is_busy(last):
                # Each rank says it in its own way, by which the notebook knows that they are out of step.
                self.refused = NotSupported(SEVERAL.format(self.rank))
