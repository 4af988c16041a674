"""What a detached run prints, in its folder: its beginning, and as much of its end as has room.

One JSON object a line, with a number that grows: a reader that comes back goes on where it was, and sees what is gone.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEGINNING = 4 << 20
"""Bytes of the beginning, which stays."""
PART = 6 << 20
"""Bytes of each of the two files that hold the end: the older one goes where the newer one is full."""
PIECE = 1 << 17
"""Letters of a text that are kept together."""
FIRST, OLDER, NEWER = "output.0", "output.1", "output.2"


class OutputLog:
    """The keeper's side. What `shell.outlet` is on a rank: text, and what is displayed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._name = FIRST
        self._file = self._opened()
        self._size = self._count = 0

    def write(self, stream: str, text: str) -> None:
        for at in range(0, len(text), PIECE):
            self._add({"stream": stream, "text": text[at : at + PIECE]})

    def show(
        self, data: Any, metadata: Any = None, transient: Any = None, update: bool = False, wait: bool = False
    ) -> None:
        """`data`: None clears what was shown."""
        plain = json.loads(json.dumps(data, default=str)) if data is not None else None
        self._add({"display": plain, "update": update, "transient": transient or {}})

    def stream(self, name: str) -> io.TextIOBase:
        """In the place of `sys.stdout`."""
        return _Stream(self, name)

    def close(self) -> None:
        with self._lock:
            os.close(self._file)

    def _add(self, what: Mapping[str, Any]) -> None:
        with self._lock:
            line = json.dumps({"n": self._count, **what}).encode() + b"\n"
            if len(line) > PART:
                text = f"… what is shown here takes {len(line) >> 20} MB, more than is kept …\n"
                line = json.dumps({"n": self._count, "text": text}).encode() + b"\n"
            self._count += 1
            try:
                if self._size and self._size + len(line) > (BEGINNING if self._name == FIRST else PART):
                    self._turn()
                if os.write(self._file, line) < len(line):
                    os.ftruncate(self._file, self._size)
                else:
                    self._size += len(line)
            except OSError:  # the disk is full: the run goes on without
                return

    def _turn(self) -> None:
        if self._name == NEWER:
            os.replace(self._folder / NEWER, self._folder / OLDER)
        self._name, self._size = NEWER, 0
        before, self._file = self._file, self._opened()
        os.close(before)

    def _opened(self) -> int:
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        return os.open(self._folder / self._name, how, 0o600)


class _Stream(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, log: OutputLog, name: str) -> None:
        self._log, self._name = log, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._log.write(self._name, text)
        return len(text)


class OutputReader:
    """Reads what was printed, from the beginning or on from where it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0
        self._read: dict[str, tuple[int, int]] = {}
        """name of a file → which one it was, and its size, when all of it had been read"""

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come since the last call. `{"gone": count}` stands for what was let go of meanwhile."""
        for line in self._lines():
            number = line.get("n", -1)
            if number < self._next:
                continue
            if number > self._next:
                yield {"gone": number - self._next}
            self._next = number + 1
            yield line

    def _lines(self) -> Iterator[dict[str, Any]]:
        for name in (FIRST, OLDER, NEWER):
            try:
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if self._read.get(name) == (now := (status.st_ino, status.st_size)):
                    continue
                for line in file:
                    if line.endswith(b"\n"):  # else it is being written
                        said = json.loads(line)
                        if isinstance(said, dict):
                            yield said
                self._read[name] = now
