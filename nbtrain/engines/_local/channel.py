"""The kernel's end of the channel: one Unix socket to each rank.

Plain sockets and no message queue between: each thread that a message passes through has to be woken, which
an empty cell notices.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable

from nbtrain.errors import PoolError
from nbtrain.events import Event, RankState
from nbtrain.messages import Message
from nbtrain.shield import shielded
from nbtrain.worker.link import CHUNK, Frames, address, frame

PATIENCE = 5.0
"""Seconds in which a rank that is there must take some of what it is sent: Stop waits as long."""


class Channel:
    """Messages for a rank that is not there yet wait here until it is ready to read."""

    def __init__(self, directory: str, world_size: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address(directory))
        self._listener.listen(world_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._frames: dict[socket.socket, Frames] = {}
        self._ranks: dict[int, socket.socket] = {}
        self._waiting: dict[int, list[bytes]] = {rank: [] for rank in range(world_size)}
        self._heard: list[Event] = []
        """events that came while something was sent"""

    def watch(self, fd: int) -> None:
        """Wake up for this descriptor too."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        data = frame(message)
        with shielded():  # half a frame would make nonsense of all that follows
            for rank in ranks:
                if rank in self._waiting:
                    self._waiting[rank].append(data)
                elif rank in self._ranks:
                    self._write(rank, data)

    def receive(self, seconds: float) -> list[Event]:
        """Every event there is; waits for the first one, or for a watched descriptor."""
        if not self._heard:
            self._read(seconds)
        events, self._heard = self._heard, []
        return events

    def close(self) -> None:
        self._selector.close()
        for connection in (self._listener, *self._frames):
            connection.close()

    def _write(self, rank: int, data: bytes) -> None:
        """Reads meanwhile: a rank that waits for us to hear it does not hear us."""
        rest, until = memoryview(data), time.monotonic() + PATIENCE
        while rest:
            try:
                rest = rest[self._ranks[rank].send(rest, socket.MSG_DONTWAIT) :]
                until = time.monotonic() + PATIENCE
            except BlockingIOError:
                if time.monotonic() > until:
                    raise PoolError(
                        f"rank {rank} takes no message: it has not read for {PATIENCE:g} s, so it is stopped or stuck. "
                        "Run the cell again to start new ranks."
                    ) from None
                self._read(0.01)
            except OSError:  # it is gone, which its death will tell
                return

    def _read(self, seconds: float) -> None:
        ready = self._selector.select(seconds)
        with shielded():
            for key, _ in ready:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._frames[connection] = Frames()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            return
        try:
            events: list[Event] = self._frames[connection].feed(data)
        except Exception as error:  # of whatever class: it may come from an object of the user's
            raise PoolError(
                f"what a rank said cannot be read ({type(error).__name__}: {error}). "
                "Run the cell again to start new ranks."
            ) from error
        for event in events:
            self._heard.append(event)
            starting = isinstance(event, RankState) and event.state == "starting"
            if event.rank in self._waiting and not starting:  # one that starts may not read for long
                self._ranks[event.rank] = connection
                for waiting in self._waiting.pop(event.rank):
                    self._write(event.rank, waiting)
