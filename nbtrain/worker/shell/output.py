"""Sends what a rank prints, displays and gives to `log()`, and what its widgets say, to the notebook, in order.

Python's own streams go to the notebook in-band, in order with displays. File descriptors 1 and 2, where C
libraries and subprocesses write, are memory files that never fill up and that nobody has to read: a rank
that writes megabytes while it holds the interpreter lock cannot block itself, and what it wrote before a
crash can still be read by others. All of it goes on between cells.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from nbtrain.base.events import Display, Event, Metrics, Output, RankState, WidgetMessage, Widgets
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.worker.shell.rank_widgets import PendingWidgets

FLUSH_EVERY = 0.05
"""Seconds; at most 20 messages of text a second."""
LONG = 1 << 16
"""Characters; more than that do not wait for the next flush."""
POINT = 16
"""characters that a logged value counts for"""


class Outlet:
    """Collects text, and the values that a cell logs; sends them with displays, in order."""

    def __init__(self, rank: int, send: Callable[[Event], None]) -> None:
        self.rank = rank
        self._send = send
        self._parts: list[tuple[str, str]] = []
        self._size = 0
        self._sent = 0.0
        """when, by the clock of this process"""
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._widgets = PendingWidgets()
        self.shows_widgets = False
        """somebody sees this rank's widgets: of the others nothing is sent"""
        self._logged = 0.0
        """when values were sent last"""
        self._first: RankState | None = None
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._in_child)
        self.waiting = threading.Event()
        """set when text waits to be sent; cleared by the thread that then sends it (`meters.py`)"""

    def write(self, stream: str, text: str) -> None:
        with self._lock:
            self._parts.append((stream, text))
            self._size += len(text)
            now = self._size > LONG or ("\n" in text and time.monotonic() - self._sent > FLUSH_EVERY)
        self._send_or_wait(now)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Collect what a cell logs in this step: a message for each call would cost more than a small model's step."""
        with self._lock:
            for name, value in values.items():
                if (points := self._points.get(name)) is None:
                    points = self._points[name] = []
                points.append((step, value))
            self._size += POINT * len(values)
            now = self._size > LONG or time.monotonic() - self._logged > FLUSH_EVERY
        self._send_or_wait(now)

    def widget(self, message: WidgetMessage) -> None:
        """Collect what a widget says: a bar that is moved in every iteration costs no message for each."""
        with self._lock:
            self._widgets.add(message)
        self._send_or_wait(False)

    def _send_or_wait(self, now: bool) -> None:
        if now:  # also the first line or value after a while: it may be the last before a crash
            self.flush()
        elif not self.waiting.is_set():
            with shielded():
                self.waiting.set()

    def _in_child(self) -> None:
        """Another thread may have held the lock; the parent sends the text that waits."""
        self._lock = threading.RLock()
        self.waiting = threading.Event()
        self._parts, self._points, self._size = [], {}, 0
        self._widgets = PendingWidgets()
        self.shows_widgets = False

    def begin(self, first: RankState, shows_widgets: bool) -> None:
        """A cell begins: `first` goes before all that it shows, or with its end if that comes at once."""
        self._first = first
        self.shows_widgets = shows_widgets
        self._sent = self._logged = 0.0

    def unsaid(self) -> RankState | None:
        """What `begin` was given, if it is not sent yet."""
        with self._lock:
            first, self._first = self._first, None
        return first

    def announce(self) -> None:
        if self._first is None:
            return
        with shielded():
            if (first := self.unsaid()) is not None:
                self._send(first)

    def show(
        self, data: Any, metadata: Any = None, transient: Any = None, *, update: bool = False, wait: bool = False
    ) -> None:
        self.flush()
        self.announce()
        self._send(
            Display(
                rank=self.rank, time=time.time(), data=data, metadata=metadata or {}, transient=transient or {},
                update=update, wait=wait,
            )
        )  # fmt: skip

    def flush(self) -> None:
        with shielded(), self._lock:  # an interrupt would lose the text, and may leave the event's own lock held
            parts, points = self._parts, self._points
            self._parts, self._points, self._size = [], {}, 0
            if points:
                self._logged = time.monotonic()
                self.announce()
                self._send(Metrics(rank=self.rank, time=time.time(), points=points))
            if self._widgets.messages:
                self.announce()
                self._send(Widgets(rank=self.rank, time=time.time(), messages=self._widgets.take()))
            at = 0
            if parts:
                self._sent = time.monotonic()
                self.announce()
            while at < len(parts):
                stream = parts[at][0]
                end = at
                while end < len(parts) and parts[end][0] == stream:
                    end += 1
                text = "".join(part[1] for part in parts[at:end])
                self._send(Output(rank=self.rank, time=time.time(), stream=stream, text=text))
                at = end


class RankStream(io.TextIOBase):
    """`sys.stdout` and `sys.stderr` of a rank.

    In a process that the rank forks, such as a loader's worker, nobody sends what is collected here: its text goes to
    the file descriptor, which the rank reads. Whoever held on to the stream, as logging does, writes there too.
    """

    def __init__(self, name: str, outlet: Outlet, fd: int) -> None:
        super().__init__()
        self._name = name
        self._outlet = outlet
        self._fd = fd
        self._plain: TextIO | None = None
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self._plain = open(  # noqa: SIM115 lives as long as the process
            self._fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]  # TextIOBase has an attribute
        return "utf-8"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() takes text, not {type(text).__name__}")
        if self._plain is not None:
            self._plain.write(text)
        elif text:
            self._outlet.write(self._name, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        """Text is sent by the clock; a flush need not cost a message."""
        if self._plain is not None:
            self._plain.flush()

    @property
    def buffer(self) -> Any:
        return _Bytes(self)


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)


class Drain:
    """Reads what C code and subprocesses wrote to a file descriptor."""

    def __init__(self, fd: int, stream: str, path: str, taken: memoryview[int]) -> None:
        """`taken`: shared memory with the number of bytes read, for the kernel when this process is dead."""
        self.stream = stream
        self._at = 0
        self._taken = taken
        # Appending, so that writers of several processes do not overwrite each other.
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.dup2(self._file, fd)

    def read(self) -> str:
        size = os.fstat(self._file).st_size
        if size < self._at:  # somebody opened /dev/stdout for writing, which empties it
            self._at = 0
        if size == self._at:
            return ""
        data = os.pread(self._file, size - self._at, self._at)
        self._at += len(data)
        self._taken[0] = self._at
        if sys.platform == "linux" and self._at > LONG:
            _punch(self._file, self._at)
        return data.decode("utf-8", "replace")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _punch(fd: int, size: int) -> None:
    """Give back the memory of what was read; the file keeps its length."""
    keep_size_and_punch_hole = 0x01 | 0x02
    _LIBC.fallocate(fd, keep_size_and_punch_hole, ctypes.c_long(0), ctypes.c_long(size))


class Outputs:
    """Replaces stdout, stderr and descriptors 1 and 2 for the life of the process."""

    def __init__(
        self, rank: int, send: Callable[[Event], None], files: Sequence[str], taken: Sequence[memoryview[int]]
    ) -> None:
        """`files`: behind the file descriptors; `taken`: see `Drain`."""
        self.outlet = Outlet(rank, send)
        self._drains = [Drain(1, "stdout", files[0], taken[0]), Drain(2, "stderr", files[1], taken[1])]
        self._streams = RankStream("stdout", self.outlet, 1), RankStream("stderr", self.outlet, 2)
        self._draining = threading.Lock()
        """held until what a thread read is in the outlet, before another reads on or reports the end"""
        os.register_at_fork(after_in_child=self._in_child)
        self.take_back()

    def _in_child(self) -> None:
        self._draining = threading.Lock()

    def take_back(self) -> None:
        """Put our streams back, where a cell has replaced them."""
        standard: Any = sys  # for mypy they are no TextIO, and Final
        standard.stdout = standard.__stdout__ = self._streams[0]
        standard.stderr = standard.__stderr__ = self._streams[1]

    def drain(self) -> None:
        with shielded(), self._draining:
            for drain in self._drains:
                text = drain.read()
                if text:
                    self.outlet.write(drain.stream, text)

    def finish(self) -> None:
        """Send everything that was written so far."""
        _LIBC.fflush(None)
        self.drain()
        self.outlet.flush()
