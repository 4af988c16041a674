"""Defers a press on Stop while something must not be cut in two."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

ENOUGH = 3
"""Presses after which KeyboardInterrupt is raised in any case."""
AT_ONCE = 0.4
"""Seconds in which two presses count as one: a double click."""


T = TypeVar("T")


def uninterrupted(what: Callable[[], T]) -> T:
    """Run what needs every rank to its end. A rank raises no interrupt in here: it knows this function by its code."""
    return what()


def changing(what: Callable[[], T]) -> T:
    """Run what changes objects one after another. The same, and an exception in here leaves them half changed."""
    return what()


@contextmanager
def shielded() -> Iterator[None]:
    """Raises an interrupt that comes inside at the end: half a model must not come home."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


class Presses:
    """Counts presses on Stop. Each raises KeyboardInterrupt until `only_count` is called; from then on callers look at
    `count`, and no event of the ranks is lost."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = self.over = self._asked = False
        self.before: Any = signal.default_int_handler
        self._last = -AT_ONCE  # of those that counted

    def only_count(self) -> None:
        self._counting = True

    def ask(self) -> None:
        """Stop, from a button of nbtrain's or another thread. A press on Stop that follows is not a second one."""
        if not self.count:
            self.count, self._asked = 1, True

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self._counting:
            now = time.monotonic()
            if now - self._last < AT_ONCE:
                return
            self._last = now
            if self._asked:
                self._asked = False
            else:
                self.count += 1
        if callable(self.before) and (self.over or not self._counting or self.count >= ENOUGH):
            self.before(number, frame)

    def restore(self) -> None:
        if signal.getsignal(signal.SIGINT) == self.hear:
            signal.signal(signal.SIGINT, self.before)


@contextmanager
def presses(later: Callable[[Callable[[], None]], None]) -> Iterator[Presses]:
    """Count presses inside. `later` gets a function to call once the error has been shown: the second half of a double
    click must not interrupt that."""
    found = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    found.before = signal.signal(signal.SIGINT, found.hear)
    try:
        yield found
    finally:
        found.over = True
        later(found.restore) if found.count else found.restore()
