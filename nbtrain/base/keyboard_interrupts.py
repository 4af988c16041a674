"""Counts presses on Stop, and defers one while something must not be cut in two."""

from __future__ import annotations

import os
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


_held_back: list[tuple[int, FrameType | None]] | None = None
"""presses that came inside of a shield of the main thread; None outside of shields"""
_presses: Presses | None = None
"""who counts presses now"""


def _forget() -> None:
    global _held_back, _presses
    _held_back = _presses = None


os.register_at_fork(after_in_child=_forget)  # a rank that is a fork of the kernel has handlers of its own


class shielded:
    """Raises an interrupt that comes inside at the end: half a model must not come home.

    A cell enters some twenty of them, so only the outermost does anything, and while presses are counted it need not
    replace the handler.
    """

    __slots__ = ("_before", "_outermost", "_replaced")

    def __enter__(self) -> None:
        global _held_back
        self._outermost = _held_back is None and threading.current_thread() is threading.main_thread()
        if self._outermost:
            came: list[tuple[int, FrameType | None]] = []
            self._before: Any = signal.getsignal(signal.SIGINT)
            self._replaced = _presses is None or self._before != _presses.hear
            if self._replaced:
                signal.signal(signal.SIGINT, lambda *args: came.append(args))
            _held_back = came

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        global _held_back
        if not self._outermost:
            return
        came, _held_back = _held_back, None
        if self._replaced:
            signal.signal(signal.SIGINT, self._before)
        if came and kind is None and callable(self._before):
            self._before(*came[0])


class SecondPress:
    """Looks for two presses on Stop inside of a shield, for who waits there for something that may not come."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._seen = len(_held_back or ())
        self.second = False

    def first(self) -> bool:
        """Look; whether the first has come since the last look."""
        came, now = len(_held_back or ()) > self._seen, time.monotonic()
        self._seen = len(_held_back or ())
        if not came:
            return False
        if self._first is None:
            self._first = now
            return True
        self.second |= now - self._first > AT_ONCE
        return False


class Presses:
    """Counts presses on Stop. Each raises KeyboardInterrupt until `only_count` is called; from then on callers look at
    `count`, and no event of the ranks is lost."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = self.over = self._asked = False
        self.before: Any = signal.default_int_handler
        self.wake: Callable[[], None] = lambda: None
        """called with each, so that who waits for something else looks at `count`"""
        self._last = -AT_ONCE  # of those that counted

    def only_count(self) -> None:
        self._counting = True

    def ask(self) -> None:
        """Stop, from a button of nbtrain's or another thread. A press on Stop that follows is not a second one."""
        if not self.count:
            self.count, self._asked = 1, True
            self.wake()

    def press(self) -> None:
        """A press on Stop that another handler has heard."""
        self.count += 1
        self.wake()

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.wake()
        if _held_back is not None:
            _held_back.append((number, frame))
            return
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
    global _held_back, _presses
    heard = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    heard.before = signal.signal(signal.SIGINT, heard.hear)
    outer, shield = _presses, _held_back
    _presses, _held_back = heard, None
    try:
        yield heard
    finally:
        _presses, _held_back = outer, shield
        heard.over = True
        later(heard.restore) if heard.count else heard.restore()
