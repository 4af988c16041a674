"""Runs one job in a process forked from the nursery, so that what it runs and leaves behind is not the kernel's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.errors import PoolError
from nbtrain.base.messages import KernelEnvironment
from nbtrain.engines._local.warm import Warm, warm

LONG = 2.0
"""Seconds after which the user is told what is waited for."""
LOOK_UP = 0.1


def ask(
    job: Callable[[Any], Any],
    payload: Any,
    environment: KernelEnvironment,
    seconds: float,
    waits: Callable[[], None],
) -> Any:
    """What `job(payload)` returns there. None: its process ended without an answer, or took longer and was killed.

    `job` is found by its name. `waits` is called once if it takes long, as while the nursery imports torch.
    """
    try:
        return _asked(warm(), (job, environment, payload), seconds, waits)
    except (EOFError, OSError, PoolError):  # it has died, or the nursery; or there is no room for them
        return None


def _asked(nursed: Warm, order: tuple[Any, ...], seconds: float, waits: Callable[[], None]) -> Any:
    ours, theirs = multiprocessing.Pipe()
    waited = _Waited(ours, waits)
    pid = None
    with ours:
        try:
            with theirs:
                nursed.give("scratch", end=theirs.fileno())
            waited.answer(None, nursed.attend)
            pid = ours.recv()
            ours.send(order)
            return ours.recv() if waited.answer(seconds) else None
        finally:
            if pid is not None:
                nursed.kill_scratch(pid)


class _Waited:
    """Waits for answers on one end of a pipe, and says so once if that takes long."""

    def __init__(self, end: Connection[Any, Any], waits: Callable[[], None]) -> None:
        self._end = end
        self._waits: Callable[[], None] | None = waits
        self._whole = Stopwatch()

    def answer(self, seconds: float | None, attend: Callable[[], None] = lambda: None) -> bool:
        """Whether something came in time. `attend` sees to it that somebody answers."""
        watch = Stopwatch()
        while not self._end.poll(LOOK_UP):
            attend()
            if seconds is not None and watch.seconds > seconds:
                return False
            if self._waits is not None and self._whole.seconds > LONG:
                self._waits()
                self._waits = None
        return True
