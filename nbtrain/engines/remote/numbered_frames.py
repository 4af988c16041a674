"""Numbers what is sent to a peer, and sends again what a broken connection has lost.

ZeroMQ connects anew by itself, and drops what was under way. So each frame has a number, each side says which it has
received, and what the other has not is kept. What is new goes out only while little is under way: a large parcel
on a slow line must neither fill the memory nor keep urgent words waiting.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

HEAD = struct.Struct("<BQQ")
"""kind, number, and the last number that the sender has received in order; behind it the parts' sizes, if one is cut"""
NUMBERED, URGENT, BEAT, AGAIN = range(4)
"""NUMBERED  arrives once, and in order
URGENT    overtakes those; one that is lost is not sent again
BEAT      says what was received, and that the sender lives
AGAIN     a frame is missing: all after the stated one are to be sent again
"""
WINDOW = 16 << 20
"""Bytes that may be under way."""
OFTEN = 1 << 20
"""Bytes received after which the sender is told, though more may come."""
PIECE = 1 << 20
"""Bytes of a part that ZeroMQ is given: longer ones are cut, so that"""
LONGEST = PIECE + 1024
"""may be the limit for what comes in (ZMQ_MAXMSGSIZE). ZeroMQ makes room for a part before it knows whose it is, and
without a limit a stranger fills the memory."""
PATIENCE = 2.0
"""Seconds in which frames that were asked for again should be there."""
Frame = bytes | memoryview


class NumberedFrames:
    """One peer's, as one side sees it. For one thread, but for `send`."""

    def __init__(self, post: Callable[[Sequence[Frame]], bool]) -> None:
        """`post` sends one message of several parts, or returns False: there is no connection, or no room."""
        self._post = post
        self._queue: deque[tuple[Frame, ...]] = deque()
        """not sent yet"""
        self._open: deque[tuple[int, int, tuple[Frame, ...]]] = deque()
        """number, bytes and content of what was sent and not received, as far as is known"""
        self._under_way = 0
        self.bytes_sent = self.bytes_received = 0
        """without what was sent again"""
        self._sent = 0
        self._received = 0
        self._told = 0
        self._untold = 0
        """bytes that were received since the peer was told"""
        self._asked_again = 0, 0.0
        """the frame that was asked for last, and when"""
        self._sent_again = 0, 0.0
        """the frame that was sent again last as it was asked for, and when"""

    def send(self, *parts: Frame) -> None:
        """May be called by any thread; `pump` sends it."""
        self._queue.append(parts)

    def urge(self, *parts: Frame) -> bool:
        return self._say(URGENT, 0, parts)

    @property
    def idle(self) -> bool:
        """All that was sent has arrived."""
        return not self._queue and not self._open

    def pump(self) -> None:
        """Send what may be sent now, and say what was received."""
        while self._queue:
            parts = self._queue[0]
            size = sum(len(part) for part in parts)
            if self._open and self._under_way + size > WINDOW:
                break
            if not self._say(NUMBERED, self._sent + 1, parts):
                return
            self._queue.popleft()
            self._sent += 1
            self._open.append((self._sent, size, parts))
            self._under_way += size
            self.bytes_sent += size
        if self._told != self._received:
            self.beat()

    def beat(self) -> bool:
        return self._say(BEAT, self._sent, ())

    def heard(self, parts: Sequence[Any]) -> Sequence[Any] | None:
        """The content of a frame that came in; None where there is none to be read, or it was read before."""
        kind, number, received = HEAD.unpack_from(parts[0])
        if len(parts[0]) > HEAD.size:
            parts = [parts[0], *_joined(parts)]
        while self._open and self._open[0][0] <= received:
            self._under_way -= self._open.popleft()[1]
        if kind == URGENT:
            return parts[1:]
        if kind == AGAIN:
            self._asked_for_again()
            return None
        if kind == BEAT:
            if number > self._received:  # the last ones were lost, and none has come after them
                self._ask_again(number)
            return None
        if number != self._received + 1:
            if number > self._received:
                self._ask_again(number)
            return None
        self._received = number
        size = sum(len(part) for part in parts[1:])
        self._untold += size
        self.bytes_received += size
        if self._untold > OFTEN:
            self.beat()
        return parts[1:]

    def again(self) -> None:
        """Send once more what may have been lost: the connection is a new one."""
        for number, _, parts in self._open:
            if not self._say(NUMBERED, number, parts):
                return

    def _asked_for_again(self) -> None:
        """The same frames no more often than they are asked for: all that is under way may be sent each time."""
        first, now = self._open[0][0] if self._open else 0, time.monotonic()
        if self._sent_again[0] != first or now - self._sent_again[1] >= PATIENCE / 2:
            self._sent_again = first, now
            self.again()

    def _ask_again(self, number: int) -> None:
        """Once for each gap, as frames that follow it are under way; after a while again, as that may be lost too."""
        now = time.monotonic()
        if self._asked_again[0] != self._received + 1 or now - self._asked_again[1] > PATIENCE:
            self._asked_again = self._received + 1, now
            self._say(AGAIN, number, ())

    def _say(self, kind: int, number: int, parts: Sequence[Frame]) -> bool:
        head = HEAD.pack(kind, number, self._received)
        if any(len(part) > PIECE for part in parts):
            sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
            head, parts = head + sizes, [piece for part in parts for piece in _cut(part)]
        if not self._post([head, *parts]):
            return False
        self._told, self._untold = self._received, 0
        return True


def urgent(*parts: Frame) -> Sequence[Frame]:
    """A frame for one who is no peer."""
    return [HEAD.pack(URGENT, 0, 0), *parts]


def read_urgent(parts: Sequence[Any]) -> Sequence[Any]:
    """What one who is no peer has said; empty where he takes himself for one. Raises `ValueError` for no frame."""
    kind = HEAD.unpack_from(parts[0])[0] if len(parts[0]) >= HEAD.size else -1
    if kind not in (NUMBERED, URGENT, BEAT, AGAIN):
        raise ValueError("no frame of nbtrain's")
    return parts[1:] if kind == URGENT else ()


def _cut(part: Frame) -> Iterable[Frame]:
    content = memoryview(part)
    return [content[at : at + PIECE] for at in range(0, len(content), PIECE)] or [part]


def _joined(parts: Sequence[Any]) -> Iterable[Frame]:
    """The parts as they were before they were cut."""
    pieces = iter(parts[1:])
    for (size,) in struct.iter_unpack("<Q", memoryview(parts[0])[HEAD.size :]):
        yield b"".join(next(pieces) for _ in range(max(1, -(-size // PIECE))))
