"""What a press on Stop must not cut in two."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENOUGH = 3
"""Presses after which something is raised, whatever goes on."""
AT_ONCE = 0.4
"""Seconds in which two presses are one: a double click is no second thought."""


@contextmanager
def shielded() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end: half a model must not come home."""
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
    """How often Stop was pressed. They are raised as they come until `only_count` was called; then whoever looks sees
    them, and nothing that was heard from the ranks is lost."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = self.over = self._asked = False
        self.before: Any = signal.default_int_handler
        self._last = -AT_ONCE  # of those that counted

    def only_count(self) -> None:
        self._counting = True

    def ask(self) -> None:
        """The same wish by another way: a button of ours, another thread. Who then presses Stop, too, has not pressed
        twice."""
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
    """`later` is given what is to be called when what was raised has been shown: the second half of a double click must
    not come between."""
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
