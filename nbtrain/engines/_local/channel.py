"""The kernel's end of the channel: one Unix socket to each rank.

Plain sockets and no message queue between: each thread that a message passes through has to be woken, which
an empty cell notices.
"""

from __future__ import annotations

import pickle
import secrets
import selectors
import socket
from collections.abc import Iterable

from nbtrain.errors import PoolError
from nbtrain.events import Event, RankState
from nbtrain.messages import Message
from nbtrain.patience import Patience
from nbtrain.shield import shielded
from nbtrain.worker.link import CHUNK, DOWN, NAME, UP, Forged, Frames, Sealer, address

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
        self._strangers: dict[socket.socket, bytearray] = {}
        self._peers: dict[socket.socket, Frames] = {}
        self._ranks: dict[int, tuple[socket.socket, Sealer]] = {}
        self._heard: list[Event] = []
        """events that came while something was sent"""
        self._waiting: dict[int, list[bytes]] = {}
        self.secrets: dict[int, bytes] = {}
        """what each rank's process is to be given when it is born"""
        for rank in range(world_size):
            self.expect(rank)

    def expect(self, rank: int) -> None:
        """A new process takes this rank's place."""
        if rank in self._ranks:
            self._drop(self._ranks.pop(rank)[0])
        self._waiting[rank] = []
        self.secrets[rank] = secrets.token_bytes(32)

    def watch(self, fd: int) -> None:
        """Wake up for this descriptor too."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        data = pickle.dumps(message, 5)
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
        for connection in (self._listener, *self._strangers, *self._peers):
            connection.close()

    def _write(self, rank: int, data: bytes) -> None:
        """Reads meanwhile: a rank that waits for us to hear it does not hear us."""
        connection, sealer = self._ranks[rank]
        rest, patience = memoryview(sealer.frame(data)), Patience(PATIENCE)
        while rest:
            try:
                rest = rest[connection.send(rest, socket.MSG_DONTWAIT) :]
                patience = Patience(PATIENCE)
            except BlockingIOError:
                if patience.over:
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
                    self._strangers[connection] = bytearray()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(CHUNK)
        except OSError:  # closed since the selector saw it, too
            data = b""
        if connection in self._strangers:
            self._meet(connection, data)
        elif connection in self._peers:
            if data:
                self._take(connection, data)
            else:
                self._selector.unregister(connection)

    def _meet(self, connection: socket.socket, data: bytes) -> None:
        """Nobody is believed to be a rank before a frame of his was found right."""
        said = self._strangers[connection]
        said += data
        if data and len(said) < NAME.size:
            return
        rank = NAME.unpack_from(said)[0] if data else None
        if rank not in self.secrets or rank in self._ranks:
            self._drop(connection)
            return
        frames = Frames(self.secrets[rank], UP)
        try:
            events = frames.feed(said[NAME.size :])
        except Forged:
            self._drop(connection)
            return
        if events:
            del self._strangers[connection]
            self._peers[connection] = frames
            self._ranks[rank] = connection, Sealer(self.secrets[rank], DOWN)
            self._note(events)

    def _take(self, connection: socket.socket, data: bytes) -> None:
        try:
            events: list[Event] = self._peers[connection].feed(data)
        except Exception as error:  # of whatever class: it may come from an object of the user's
            raise PoolError(
                f"what a rank said cannot be read ({type(error).__name__}: {error}). "
                "Run the cell again to start new ranks."
            ) from error
        self._note(events)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            self._heard.append(event)
            starting = isinstance(event, RankState) and event.state == "starting"
            if event.rank in self._waiting and not starting:  # one that starts may not read for long
                for waiting in self._waiting.pop(event.rank):
                    self._write(event.rank, waiting)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._peers.pop(connection, None)
        connection.close()
