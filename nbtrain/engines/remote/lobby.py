"""The kernel's end: listens for machines, lets those in that have a ticket, and speaks with them in a thread of its
own, so that a kernel that computes keeps none of them waiting.

Connections are encrypted, and both ends proven, by CURVE (a part of ZeroMQ) with keys made for this kernel's pool. It
is there only once somebody asks for ranks on other machines.
"""

from __future__ import annotations

import atexit
import errno
import os
import pickle
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import psutil
import zmq
from zmq.utils import z85

import nbtrain.machine.host as host
from nbtrain.base.errors import PoolError
from nbtrain.engines.remote import join_message
from nbtrain.engines.remote.admission import Admission
from nbtrain.engines.remote.machines import Machine, address_towards, own_prefixes
from nbtrain.engines.remote.numbered_frames import LONGEST, Frame, NumberedFrames, read_urgent, urgent
from nbtrain.engines.remote.protocol import ALERT, ASLEEP, BEAT, Admitted, Leave, Refused
from nbtrain.engines.remote.ticket import Ticket

GONE = 2.0
"""Seconds without a connection after which a machine's node is taken for dead; while one is there it may be silent:"""
SILENT = float(os.environ.get("NBTRAIN_MACHINE_SILENT", "60"))
"""Seconds without a word after which the machine is given up."""
JOIN = "join"
"""the source of tickets that the user hands out himself"""
HOUR = 3600.0
MONTH = 30 * 24 * HOUR
"""A queue may be that long. The keys of a ticket are worth nothing once the notebook has ended."""
PATIENCE = 1.0
"""Seconds in which machines hear that the notebook ends."""
HANDSHAKE = 3000
"""Milliseconds in which a connection proves its key: strangers who say nothing hold descriptors so long."""
DESCRIPTORS = 16384
"""The kernel may have so many from then on, as far as its hard limit goes: a usual limit is 1024."""
MANY = 256
"""Messages after which the thread does what else there is to do, though more may wait."""
UNREAD = "the notebook cannot read what this machine says{}: is nbtrain the same on both?"
_kept: Lobby | None = None


def lobby() -> Lobby:
    """The kernel's one lobby; opened if there is none."""
    global _kept
    if _kept is None or _kept.owner != os.getpid():
        _kept = Lobby()
        atexit.register(_kept.close)
    return _kept


def if_open() -> Lobby | None:
    return _kept if _kept is not None and _kept.owner == os.getpid() else None


@dataclass(eq=False)
class Peer:
    """A machine that has joined."""

    identity: bytes
    key: str
    """the public one of its ticket, which its connection has proven"""
    machine: Machine
    source: str
    """of its ticket"""
    frames: NumberedFrames
    heard: float
    """when, by the monotonic clock"""
    unreachable: float | None = None
    """since when it has no connection"""
    clock: int = 0
    """nanoseconds that its monotonic clock is behind ours"""
    beside: bool = False
    """it is on the kernel's own machine: each opens the other's shared memory"""

    def __str__(self) -> str:
        return str(self.machine)


class Listener(Protocol):
    """Whoever has the machines. All calls come from the lobby's thread."""

    def hear(self, peer: Peer, said: Any, data: Sequence[Any]) -> None:
        """A machine has said this."""

    def lose(self, peer: Peer, why: str) -> None:
        """A machine is given up."""

    def turn(self) -> bool:
        """A turn of the thread's loop; returns whether to look again soon."""


class Lobby:
    """All calls but those that are said to be the thread's come from the kernel's threads."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        host.allow_descriptors(DESCRIPTORS)
        self.pool = secrets.token_hex(8)
        self.peers: dict[bytes, Peer] = {}
        self.admission = Admission()
        self.on_close: list[Callable[[], None]] = []
        """called when the notebook ends"""
        self.listener: Listener | None = None
        """the pool that has machines now"""
        self._kernel_key, self._secret_key = zmq.curve_keypair()
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._closing = False
        self._due, self._soon = 0.0, False
        """when signs of life are due; whether to look at the board soon"""
        self._context = zmq.Context()
        self._door = self._context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whether a key is known
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = self._secret_key
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a machine whose connection has dropped comes again
        self._socket.sndhwm = self._socket.rcvhwm = 0  # `NumberedFrames` has a limit of its own
        self._socket.maxmsgsize = LONGEST
        self._socket.handshake_ivl = HANDSHAKE
        self._socket.linger = int(1000 * PATIENCE)
        self._socket.ipv6 = socket.has_ipv6
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.port = self._bind()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._serve, name="nbtrain-machines", daemon=True)
        self._thread.start()

    def _bind(self) -> int:
        wanted = os.environ.get("NBTRAIN_PORT", "0")
        try:
            self._socket.bind(f"tcp://*:{wanted}")
        except zmq.ZMQError as error:
            raise PoolError(
                f"the notebook cannot listen for other machines on port {wanted} (NBTRAIN_PORT): {error.strerror}"
            ) from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    # -- tickets and machines ---------------------------------------------------------------

    def ticket(self, seconds: float = HOUR, source: str = JOIN) -> Ticket:
        """A new one, for any number of machines. `source`: who made it, to tell its machines from others."""
        public, secret = zmq.curve_keypair()
        ticket = Ticket(
            self.pool, own_addresses(), self.port, self._kernel_key.decode(), public.decode(), secret.decode(),
            round(time.time() + seconds),
        )  # fmt: skip
        self.admission.give(ticket, source)
        return ticket

    def machines(self, source: str | None = None) -> list[Peer]:
        """Those that are there, in the order in which they came."""
        return [peer for peer in list(self.peers.values()) if source in (None, peer.source)]

    def send_away(self, peers: Iterable[Peer], reason: str) -> None:
        for peer in peers:
            self.send(peer, Leave(reason=reason))
        self.wake()

    def wait(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Wait until machines have come or gone so that this holds; returns whether it does."""
        with self._changed:
            return self._changed.wait_for(enough, seconds)

    def send(self, peer: Peer, said: Any, *data: Frame) -> None:
        peer.frames.send(pickle.dumps(said, 5), *data)

    def wake(self) -> None:
        """Send what there is to be sent. May be called by a signal handler."""
        with suppress(OSError):
            os.write(self._wake, b".")

    def soon(self, do: Callable[[], None]) -> None:
        """Do this in the thread."""
        self._tasks.append(do)
        self.wake()

    def close(self, reason: str = "the notebook has ended") -> None:
        """Send all machines away, and stop listening."""
        global _kept
        if self._closing or os.getpid() != self.owner:
            return
        if _kept is self:
            _kept = None

        def leave() -> None:
            self.send_away(self.machines(), reason)
            self._closing = True

        self.soon(leave)
        self._thread.join(3 * PATIENCE)
        for do in self.on_close:
            do()

    # -- the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poller = zmq.Poller()
        for socket_there in (self._socket, self._door, self._monitor, self._woken):
            self._poller.register(socket_there, zmq.POLLIN)
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # of ours: who waits for a machine is to hear of it
                for peer in self.machines():
                    self._lose(peer, f"an error of nbtrain's own: {type(error).__name__}: {error}")
        self._end()

    def _turn(self) -> None:
        wait = ALERT if self._soon else max(0.0, min(BEAT, self._due - time.monotonic()))
        began = time.monotonic()
        self._poller.poll(int(1000 * wait))
        if (asleep := time.monotonic() - began - wait) > ASLEEP:  # nobody was heard, as nobody listened
            for peer in self.machines():
                peer.heard += asleep
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)
        while self._tasks:
            self._tasks.popleft()()
        self._answer_door()
        for _ in islice(iter(lambda: self._monitor.poll(0), 0), MANY):  # whose connection the signs of life will say
            self._monitor.recv_multipart()
            self._due = 0.0
        for parts in islice(iter(self._receive, None), MANY):
            self._hear(parts[0].bytes, parts[1].get("User-Id"), [part.buffer for part in parts[1:]])
        self._soon = self.listener is not None and self.listener.turn()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + BEAT
            for peer in self.machines():
                self._look_after(peer)
        for peer in self.machines():
            peer.frames.pump()

    def _end(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and any(not peer.frames.idle for peer in self.machines()):
            if self._socket.poll(20):
                while (parts := self._receive()) is not None:
                    if (peer := self.peers.get(parts[0].bytes)) is not None:
                        peer.frames.heard([part.buffer for part in parts[1:]])
            for peer in self.machines():
                peer.frames.pump()
        self._socket.disable_monitor()
        self._socket.close()
        self._door.close()
        self._context.destroy(0)
        os.close(self._woken)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _receive(self) -> list[Any] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _answer_door(self) -> None:
        """Say who may connect."""
        taking_part = {peer.key for peer in self.machines()}
        for _ in islice(iter(lambda: self._door.poll(0), 0), MANY):
            version, request, _, _, _, _, key = self._door.recv_multipart()[:7]
            name = z85.encode(key) if len(key) == 32 else b""
            may = self.admission.connects(name.decode(), taking_part)
            code, text = (b"200", b"OK") if may else (b"400", b"no ticket")
            self._door.send_multipart([version, request, code, text, name, b""])

    def _hear(self, identity: bytes, key: str, parts: list[Any]) -> None:
        peer = self.peers.get(identity)
        if peer is None or peer.key != key:
            return self._meet(identity, key, parts)
        try:
            peer.heard, peer.unreachable = time.monotonic(), None
            content = peer.frames.heard(parts)
            if not content:
                return
            if join_message.read(content) is not None:  # it has not heard that it was admitted
                self._admit(peer)
            else:
                self._pass_on(peer, pickle.loads(content[0]), content[1:])
        except Exception as error:  # of whatever class: what a machine sends may be of another version
            what = f"{type(error).__name__}: {error}"
            self.admission.refused[what[:100]] += 1
            self._lose(peer, f"what it said cannot be read ({what})")

    def _meet(self, identity: bytes, key: str, parts: list[Any]) -> None:
        """Somebody who does not take part. Nothing is kept of him."""
        why = self.admission.why_not(key) or ("its name is another machine's" if identity in self.peers else "")
        join = None
        if not why:
            try:
                content = read_urgent(parts)
                join = join_message.read(content)
                why = "" if join else UNREAD.format("") if content else "the notebook has given this machine up"
            except ValueError as error:
                why = UNREAD.format(f" ({error})")
        if join is None:
            if self.admission.answers(identity):
                self.admission.refused[why.partition(";")[0].partition(" (")[0]] += 1
                self._post(identity, urgent(pickle.dumps(Refused(reason=why), 5)))
            return
        peer = Peer(
            identity, key, join.machine, self.admission.source(key), self._frames(identity), time.monotonic(),
            clock=time.monotonic_ns() - join.machine.clock, beside=join.machine.proof.holds_here(),
        )  # fmt: skip
        with self._changed:
            self.peers[identity] = peer
            self._admit(peer)
            self._changed.notify_all()

    def _frames(self, identity: bytes) -> NumberedFrames:
        return NumberedFrames(lambda parts: self._post(identity, parts))

    def _admit(self, peer: Peer) -> None:
        peer.frames.urge(pickle.dumps(Admitted(clock=time.monotonic_ns(), prefixes=own_prefixes()), 5))

    def _look_after(self, peer: Peer) -> None:
        now = time.monotonic()
        peer.frames.beat()
        if peer.unreachable is not None and now - peer.unreachable > GONE:
            self._lose(peer, "its node has ended")
        elif now - peer.heard > SILENT:
            self._lose(peer, f"it has said nothing for {SILENT:g} s")

    def _lose(self, peer: Peer, why: str) -> None:
        with self._changed:
            if self.peers.pop(peer.identity, None) is None:
                return
            self._changed.notify_all()
        if self.listener is not None:
            self.listener.lose(peer, why)

    def _pass_on(self, peer: Peer, said: Any, data: Sequence[Any]) -> None:
        if isinstance(said, Leave):
            self._lose(peer, said.reason)
        elif self.listener is not None:
            self.listener.hear(peer, said, data)

    def _post(self, identity: bytes, parts: Iterable[Frame]) -> bool:
        peer = self.peers.get(identity)
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if peer is not None and peer.unreachable is None:
                peer.unreachable = time.monotonic()
            return False
        return True


def own_addresses() -> tuple[str, ...]:
    """This machine's, the likeliest first: NBTRAIN_ADDRESS where it is set, that of the way out, all others."""
    way_out = address_towards("192.0.2.1", 9)  # an address that is nobody's
    known = [address for address in (os.environ.get("NBTRAIN_ADDRESS"), way_out) if address]
    for addresses in psutil.net_if_addrs().values():
        known += [
            entry.address
            for entry in addresses
            if entry.family == socket.AF_INET and not entry.address.startswith("127.")
        ]
    return tuple(dict.fromkeys([*known, "127.0.0.1"]))
