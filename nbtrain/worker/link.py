"""A rank's end of the channel: messages in, events out, over one Unix socket.

Messages are read by the main thread only, events are sent by whoever has something to say, one at a time.

A rank says its number, then frames: a length, a seal and a pickle. Opening a pickle runs what it says, so nothing is
opened before its seal is found right: a keyed hash of the frame's number and bytes. The key is made from a secret that
the kernel gives to each rank's process when it is born, and that is good for one connection. So frames of another
process, of another direction, or said once before are not opened either.
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import struct
import threading
from hashlib import blake2b
from typing import Any

from nbtrain.errors import PoolError
from nbtrain.events import Event
from nbtrain.messages import Message
from nbtrain.shield import shielded

HEAD = struct.Struct("<Q16s")
NUMBER = struct.Struct("<Q")
CHUNK = 1 << 18
NAME = struct.Struct("<I")
"""what a rank says first: its number"""
FIRST = 1 << 20
"""Bytes of a connection's first frame at most: until its seal was right, anybody may have sent it."""


class Forged(PoolError):
    """Bytes that nobody who knows the secret has sent here, now."""


def address(directory: str) -> str:
    """Where a pool listens."""
    return os.path.join(directory, "channel")


class Sealer:
    """Things → frames, of one direction of one connection."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._key = _key(secret, direction)
        self._number = 0

    def frame(self, data: bytes) -> bytes:
        seal = _seal(self._key, self._number, data)
        self._number += 1
        return HEAD.pack(len(data), seal) + data


class Frames:
    """Bytes as they come → the things in frames that are whole and whose seals are right."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._key = _key(secret, direction)
        self._number = 0
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[Any]:
        buffer = self._buffer
        buffer += data
        whole, at = [], 0
        while len(buffer) - at >= HEAD.size:
            size, seal = HEAD.unpack_from(buffer, at)
            if not self._number and size > FIRST:
                raise Forged("a first frame of this length is none of ours")
            end = at + HEAD.size + size
            if end > len(buffer):
                break
            content = bytes(buffer[at + HEAD.size : end])
            if not hmac.compare_digest(seal, _seal(self._key, self._number, content)):
                raise Forged("a frame's seal is not right")
            self._number += 1
            whole.append(content)
            at = end
        del buffer[:at]  # before anything is opened: what cannot be is not met again with the next bytes
        return [pickle.loads(content) for content in whole]


def _key(secret: bytes, direction: bytes) -> bytes:
    return blake2b(direction, key=secret).digest()


def _seal(key: bytes, number: int, data: bytes) -> bytes:
    made = blake2b(NUMBER.pack(number), key=key, digest_size=16)
    made.update(data)
    return made.digest()


UP, DOWN = b"rank to kernel", b"kernel to rank"


class Link:
    """Made in the rank's own process."""

    def __init__(self, directory: str, rank: int, secret: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address(directory))
        self._socket.sendall(NAME.pack(rank))
        self._frames = Frames(secret, DOWN)
        self._sealer = Sealer(secret, UP)
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

    def send(self, event: Event) -> None:
        if os.getpid() != self._owner:
            return
        data = pickle.dumps(event, 5)
        with shielded(), self._lock:  # half a frame would make nonsense of all that follows
            self._socket.sendall(self._sealer.frame(data))

    def close(self) -> None:
        self._socket.close()
