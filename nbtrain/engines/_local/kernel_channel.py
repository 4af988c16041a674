"""Talks to the ranks from the kernel: one Unix socket to each.

Plain sockets and no message queue between: each thread that a message passes through has to be woken, which
an empty cell notices.

A connection is a stranger's until it has sent the sealed name of a rank. Strangers keep nobody waiting: no more is read
of each than a name has bytes, and their number is limited.
"""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress

from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import PoolError
from nbtrain.base.events import Event, RankState
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.base.messages import Message
from nbtrain.watch.beacon.client import of_this_user
from nbtrain.worker.process.rank_channel import CHUNK, DOWN, NAME, NUMBER, UP, Forged, Frames, Sealer, address

PATIENCE = 5.0
"""Seconds in which a rank that is there must take some of what it is sent: Stop waits as long."""
STRANGERS = 64
"""Connections that have not said a name; one more, and the oldest goes. A rank says its own as it connects."""


class Channel:
    """Sockets to all ranks. Messages for a rank that is still starting wait here."""

    def __init__(self, directory: str, ranks: Collection[int]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        os.fchmod(self._listener.fileno(), 0o600)  # Linux makes the file so
        self._listener.bind(address(directory))
        os.chmod(address(directory), 0o600)
        self._listener.listen(len(ranks) + STRANGERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, bytearray] = {}
        self._peers: dict[socket.socket, tuple[int, Frames]] = {}
        self._ranks: dict[int, tuple[socket.socket, Sealer]] = {}
        self._heard: list[Event] = []
        """events that came while something was sent"""
        self._waiting: dict[int, list[bytes]] = {}
        self.secrets: dict[int, bytes] = {}
        """rank → the secret its process is given when it starts"""
        self.ended: set[int] = set()
        """ranks whose connection has ended, and that nobody has asked about yet"""
        for rank in ranks:
            self.expect(rank)

    def expect(self, rank: int) -> None:
        """A new process takes this rank's place."""
        if rank in self._ranks:
            self._drop(self._ranks.pop(rank)[0])
        self.ended.discard(rank)
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
        """What ranks said; waits for the first event, for a watched descriptor, or for `wake`. Without `seconds` all
        that there is: that a connection has ended is read only after the last words on it, which nobody may have
        listened to."""
        if not self._heard:
            spoke = self._read(seconds)
            while spoke and not seconds:
                spoke = self._read(0)
        events, self._heard = self._heard, []
        return events

    def wake(self) -> None:
        """Have `receive` return. May be called by a signal handler, and by any thread."""
        with suppress(OSError):  # it has been woken and has not looked yet, or is closed
            os.write(self._wake, b".")

    def close(self) -> None:
        self._selector.close()
        os.close(self._woken)
        wake, self._wake = self._wake, -1
        os.close(wake)
        for connection in (self._listener, *self._strangers, *self._peers):
            connection.close()

    def _write(self, rank: int, data: bytes) -> None:
        """Write to one rank, and read from all meanwhile: a rank that waits to send does not receive."""
        connection, sealer = self._ranks[rank]
        rest, patience = memoryview(sealer.frame(data)), AwakeTimeout(PATIENCE)
        while rest:
            try:
                rest = rest[connection.send(rest) :]
                patience = AwakeTimeout(PATIENCE)
            except BlockingIOError:
                if patience.over:
                    raise PoolError(
                        f"rank {rank} takes no message: it has not read for {PATIENCE:g} s, so it is stopped or stuck. "
                        "Run the cell again to start new ranks."
                    ) from None
                self._read(0.01)
            except OSError:  # it is gone, which its death will tell
                return

    def _read(self, seconds: float) -> bool:
        """Read what has arrived; True if a rank sent something."""
        spoke = False
        ready = self._selector.select(seconds)
        with shielded():
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._woken:
                    with suppress(BlockingIOError):  # read already, since the selector saw it
                        os.read(self._woken, CHUNK)
                elif key.fileobj in self._strangers:
                    self._meet(key.fileobj)
                elif key.fileobj in self._peers:
                    spoke = True
                    self._hear(key.fileobj)
        return spoke

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # gone since the selector saw it
            return
        except OSError as error:
            raise PoolError(
                f"no rank can connect: {error.strerror}. Close files that the notebook has open, or allow more of them "
                "(`ulimit -n`), and run the cell again."
            ) from error
        if not of_this_user(connection):
            connection.close()
            return
        if len(self._strangers) == STRANGERS:
            self._drop(next(iter(self._strangers)))
        connection.setblocking(False)
        self._strangers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _meet(self, connection: socket.socket) -> None:
        """Accept a connection as a rank's once the seal of its name is right."""
        said = self._strangers[connection]
        data = _received(connection, NAME.size - len(said))
        if data is None:
            return
        said += data
        if data and len(said) < NAME.size:
            return
        (rank,) = NUMBER.unpack_from(said) if data else (None,)
        if rank not in self.secrets or rank in self._ranks:
            self._drop(connection)
            return
        frames = Frames(self.secrets[rank], UP)
        try:
            frames.meet(said)
        except Forged:
            self._drop(connection)
            return
        del self._strangers[connection]
        self._peers[connection] = rank, frames
        self._ranks[rank] = connection, Sealer(self.secrets[rank], DOWN)

    def _hear(self, connection: socket.socket) -> None:
        data = _received(connection, CHUNK)
        if data is None:
            return
        if not data:
            self._ignore(connection)
            self.ended.add(self._peers[connection][0])
            return
        rank, frames = self._peers[connection]
        try:
            events: list[Event] = frames.feed(data)
        except Forged as error:
            self._drop(connection)
            raise PoolError(
                f"rank {rank} is given up: {error}, so it was not opened. Something else than nbtrain wrote to the "
                "rank's connection; a cell that writes to a descriptor which is not its own does. "
                "Run the cell again to start new ranks."
            ) from error
        except Exception as error:  # of whatever class: it may come from an object of the user's
            raise PoolError(
                f"what rank {rank} said cannot be read ({type(error).__name__}: {error}). "
                "Run the cell again to start new ranks."
            ) from error
        self._note(rank, events)

    def _note(self, rank: int, events: list[Event]) -> None:
        for event in events:
            self._heard.append(event)
            starting = isinstance(event, RankState) and event.state == "starting"
            if rank in self._waiting and not starting:  # one that starts may not read for long
                for waiting in self._waiting.pop(rank):
                    self._write(rank, waiting)

    def _ignore(self, connection: socket.socket) -> None:
        if connection in self._selector.get_map():
            self._selector.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._ignore(connection)
        self._strangers.pop(connection, None)
        self._peers.pop(connection, None)
        connection.close()


def _received(connection: socket.socket, size: int) -> bytes | None:
    """What is there; nothing at its end, None if it was read already, since the selector saw it."""
    try:
        return connection.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""
