"""Reads the last output and the stack of a rank that is dead. By which signal it died: `Death` in engines/base.py.

The files behind a rank's file descriptors 1 and 2, and those it writes its stack and its last place to, are the
kernel's: a crash, a signal or the out-of-memory killer takes none of what stands in them.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack

from nbtrain.base.events import Output
from nbtrain.engines.base import Frame
from nbtrain.exchange.shared_memory import Segment
from nbtrain.worker.loop.shared_board import TAKEN, Board

STREAMS = "stdout", "stderr"
LONGEST = 1 << 16
"""Bytes of its last words, and of a stack."""
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
FATAL = "Fatal Python error"


class BlackBox:
    """One rank's output and stack files, which belong to the kernel."""

    def __init__(self, rank: int, directory: str) -> None:
        self.rank = rank
        with ExitStack() as undo:
            files = []
            for number in range(len(STREAMS) + 2):
                files.append(Segment(number, 0, directory))
                undo.callback(files[-1].close)
            undo.pop_all()
        *self._streams, self._stack, self._last_place = files

    @property
    def paths(self) -> tuple[str, ...]:
        """Files of stdout and stderr."""
        return tuple(file.path for file in self._streams)

    @property
    def stack(self) -> str:
        return self._stack.path

    @property
    def last_place(self) -> str:
        return self._last_place.path

    @property
    def _files(self) -> tuple[Segment, ...]:
        return *self._streams, self._stack, self._last_place

    def empty(self, board: Board) -> None:
        """Clear the files for a new process of this rank."""
        for number, file in enumerate(self._files):
            os.ftruncate(file.fd, 0)
            if number < len(STREAMS):
                board.parts[self.rank][TAKEN + number] = 0

    def mark(self) -> int:
        """Where the next stack will begin."""
        size = os.fstat(self._stack.fd).st_size
        if size < LONGEST:
            return size
        os.ftruncate(self._stack.fd, 0)  # whoever writes there appends
        return 0

    def frames(self, since: int = 0) -> list[Frame]:
        return _frames_in(_read(self._stack.fd, since, since + LONGEST))

    def crash(self) -> list[Frame]:
        """The stack that faulthandler wrote when a signal killed the rank."""
        size = os.fstat(self._stack.fd).st_size
        _, fatal, text = _read(self._stack.fd, size - LONGEST, size).partition(FATAL)
        return _frames_in(text) if fatal else []

    def last_seen(self) -> list[Frame]:
        """Where the cell was when the rank last noted it."""
        text, _, _ = _read(self._last_place.fd, 0, os.fstat(self._last_place.fd).st_size).partition("\0")
        return _frames_in(text)

    def last_words(self, board: Board) -> list[Output]:
        """Output that the rank had written and not sent."""
        outputs = []
        for number, stream in enumerate(STREAMS):
            file, taken = self._streams[number], board.parts[self.rank][TAKEN + number]
            size = os.fstat(file.fd).st_size
            if text := _read(file.fd, max(taken, size - LONGEST), size):
                outputs.append(Output(rank=self.rank, time=time.time(), stream=stream, text=text))
        return outputs

    def close(self) -> None:
        for file in self._files:
            file.close()


def _frames_in(text: str) -> list[Frame]:
    """The calls that faulthandler wrote, innermost first."""
    return [Frame(name, int(line), function) for name, line, function in _LINE.findall(text)]


def _read(fd: int, start: int, end: int) -> str:
    start = max(0, start)
    return os.pread(fd, end - start, start).decode("utf-8", "replace") if end > start else ""
