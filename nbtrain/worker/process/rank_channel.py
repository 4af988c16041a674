"""A rank's end of the channel: messages in, events out, over one Unix socket.

Messages are read by the main thread only, events are sent by whoever has something to say, one at a time.

    rank → kernel   number, seal │ length, seal, seal, pickle │ length, seal, seal, pickle │ …
    kernel → rank                  length, seal, seal, pickle │ …

Opening a pickle runs what it says, so nothing is opened, and no length believed, before its seal is found right: a
keyed hash of the bytes and of how many seals came before. The key is made from a secret that the kernel gives to each
rank's process when it is born, and that is good for one connection. So what another process says is not opened, nor
what was meant for the other direction, nor what was said once before.
"""

from __future__ import annotations

import hmac
import os
import pickle
import select
import socket
import struct
import threading
from hashlib import blake2b
from typing import Any

from nbtrain.base.errors import PoolError
from nbtrain.base.events import Event
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.base.messages import Message

CHUNK = 1 << 18
NAME = struct.Struct("<I16s")
"""What a rank says first: its number, sealed."""
HEAD = struct.Struct("<Q16s16s")
"""Before each pickle: its length, sealed, and the pickle's own seal."""
NUMBER, LENGTH, COUNT = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<Q")
UP, DOWN = b"rank to kernel", b"kernel to rank"


class Forged(PoolError):
    """Bytes whose seal is wrong: their sender does not know the secret, or they were sent before."""


def address(directory: str) -> str:
    """Where a pool listens."""
    return os.path.join(directory, "channel")


class Sealer:
    """The seals of one direction of one connection, which both ends count alike."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._key = blake2b(direction, key=secret).digest()
        self._count = 0

    def next(self, data: bytes) -> bytes:
        made = blake2b(COUNT.pack(self._count), key=self._key, digest_size=16)
        self._count += 1
        made.update(data)
        return made.digest()

    def name(self, rank: int) -> bytes:
        return NAME.pack(rank, self.next(NUMBER.pack(rank)))

    def frame(self, data: bytes) -> bytes:
        size = len(data)
        return HEAD.pack(size, self.next(LENGTH.pack(size)), self.next(data)) + data


class Frames:
    """Unpickles frames from incoming bytes, once they are whole and their seals are right."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._seals = Sealer(secret, direction)
        self._buffer = bytearray()
        self._awaited: tuple[int, bytes] | None = None
        """length and seal of the pickle whose head was right"""

    def meet(self, name: bytes | bytearray) -> None:
        """Raises `Forged` unless the sender of this name knows the secret."""
        rank, seal = NAME.unpack(name)
        self._check(NUMBER.pack(rank), seal, "name")

    def feed(self, data: bytes | bytearray) -> list[Any]:
        self._buffer += data
        contents = []
        while (content := self._next()) is not None:
            contents.append(content)
        return [pickle.loads(content) for content in contents]

    def _next(self) -> bytes | None:
        """One frame, removed from the buffer before it is unpickled: one that fails is not read again."""
        if self._awaited is None:
            if len(self._buffer) < HEAD.size:
                return None
            size, seal_of_size, seal = HEAD.unpack_from(self._buffer)
            self._check(LENGTH.pack(size), seal_of_size, "frame's length")
            self._awaited = size, seal
            del self._buffer[: HEAD.size]
        size, seal = self._awaited
        if len(self._buffer) < size:
            return None
        content = bytes(memoryview(self._buffer)[:size])
        self._check(content, seal, "frame")
        self._awaited = None
        del self._buffer[:size]
        return content

    def _check(self, data: bytes, seal: bytes, what: str) -> None:
        if not hmac.compare_digest(seal, self._seals.next(data)):
            raise Forged(f"a {what} came with a seal that is not right")


class Link:
    """The rank's connection to the kernel, made in the rank's own process."""

    def __init__(self, directory: str, rank: int, secret: bytes) -> None:
        self._frames = Frames(secret, DOWN)
        self._sealer = Sealer(secret, UP)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(None)  # whatever the notebook's default is
        self._socket.connect(address(directory))
        self._socket.sendall(self._sealer.name(rank))
        self._read: list[Message] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """A loader's worker is not the rank: two that write to one socket would tear each other's frames."""
        self._lock = threading.Lock()
        self._socket.close()

    def receive(self) -> Message:
        """The next message; EOFError when the notebook is gone."""
        while not self._read:
            data = self._socket.recv(CHUNK)
            if not data:
                raise EOFError
            self._read = self._frames.feed(data)
        return self._read.pop(0)

    def wait(self, seconds: float | None) -> Message | None:
        """The next message, in the middle of a cell, which an interrupt may end: none is cut in two. None: nothing has
        come within these seconds."""
        if not self._read and not select.select([self._socket], [], [], seconds)[0]:
            return None
        with shielded():
            return self.receive()

    def send(self, event: Event) -> None:
        if os.getpid() != self._owner:
            return
        data = pickle.dumps(event, 5)
        with shielded(), self._lock:  # half a frame would make nonsense of all that follows
            self._socket.sendall(self._sealer.frame(data))

    def close(self) -> None:
        self._socket.close()
