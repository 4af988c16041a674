"""Reads from and writes to one client of the beacon, without waiting for one that reads slowly or not at all."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

CHUNK = 1 << 16
LONGEST = 4096
"""Bytes of a request."""
WAITING = 64
"""Messages that a client may leave unread: some seconds of a run. One more, and it is dropped; it can connect again."""
PEER = struct.Struct("iII")
"""What the system tells of who is at the other end: process, user, group."""


class Gone(Exception):
    """The client has left, sends nonsense, or does not read."""


class Client:
    """A connection: what has arrived on it, and messages that wait to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.watching = False
        self.since = -1
        """number of the last message that it needs not be sent"""
        self.told: Mapping[str, Any] | None = None
        """the last `about` it was sent"""
        self._said = bytearray()
        self._waiting: deque[memoryview] = deque()

    def requests(self) -> list[dict[str, Any]]:
        """The requests that have arrived."""
        try:
            data = self.connection.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            raise Gone from None
        if not data:
            raise Gone
        self._said += data
        *lines, rest = self._said.split(b"\n")
        self._said = rest
        if max(map(len, (*lines, rest))) > LONGEST:
            raise Gone
        return [_request(line) for line in lines]

    def send(self, data: bytes) -> None:
        if len(self._waiting) >= WAITING:
            raise Gone
        self._waiting.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send as much as the connection takes."""
        while self._waiting:
            try:
                taken = self.connection.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:
                raise Gone from None
            if taken == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][taken:]

    @property
    def has_unread(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        with suppress(OSError):
            # A process that was forked meanwhile has the connection too: closing it here alone would not end it.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def of_this_user(connection: socket.socket) -> bool:
    """Whether this user is at the other end, where the system tells; the folder lets nobody else in anyway."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return bool(PEER.unpack(told)[1] == os.geteuid())


def _request(line: bytearray) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):  # `[[[[…`
        raise Gone from None
    if not isinstance(request, dict):
        raise Gone
    return request
