"""A rank's end of the channel: messages in, events out, over one Unix socket.

Messages are read by the main thread only, events are sent by whoever has something to say, one at a time.
A frame is a length and a pickle.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from typing import Any

from nbtrain.events import Event
from nbtrain.messages import Message
from nbtrain.shield import shielded

HEAD = struct.Struct("<Q")
CHUNK = 1 << 18


def address(directory: str) -> str:
    """Where a pool listens."""
    return os.path.join(directory, "channel")


def frame(thing: Message | Event) -> bytes:
    data = pickle.dumps(thing, 5)
    return HEAD.pack(len(data)) + data


class Frames:
    """Bytes as they come → the frames that are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        buffer = self._buffer
        buffer += data
        whole, at = [], 0
        while len(buffer) - at >= HEAD.size:
            end = at + HEAD.size + HEAD.unpack_from(buffer, at)[0]
            if end > len(buffer):
                break
            whole.append(buffer[at + HEAD.size : end])
            at = end
        del buffer[:at]  # before anything is opened: what cannot be is not met again with the next bytes
        return [pickle.loads(data) for data in whole]


class Link:
    """Made in the rank's own process."""

    def __init__(self, directory: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address(directory))
        self._frames = Frames()
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
        data = frame(event)
        with shielded(), self._lock:  # half a frame would make nonsense of all that follows
            self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()
