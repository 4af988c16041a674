"""A node's end of the connection: finds the kernel, joins, and sends and receives. Where the connection drops it comes
again by itself, and nothing is lost.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import zmq

from nbtrain.base.errors import UsageError
from nbtrain.engines.remote import join_message
from nbtrain.engines.remote.machines import address_towards, this_machine
from nbtrain.engines.remote.numbered_frames import LONGEST, Frame, NumberedFrames
from nbtrain.engines.remote.protocol import Admitted, Join, Refused
from nbtrain.engines.remote.ticket import Ticket

FOUND = 5.0
"""Seconds in which one of the kernel's addresses should answer, before the next is tried."""
PAUSE = 1.0
"""Seconds between two attempts to reach the kernel."""
ALONE = float(os.environ.get("NBTRAIN_NODE_PATIENCE", "600"))
"""Seconds without a word of the kernel after which a node gives up."""
LINGER = 500
"""Milliseconds in which last words may leave."""


class KernelConnection:
    """One node's, from its first attempt to its end."""

    def __init__(self, ticket: Ticket, store: int) -> None:
        """`store`: the port at which process groups meet, if rank 0 is here."""
        self.ticket = ticket
        self.address = ""
        """the kernel's, by which it was reached"""
        self.frames = NumberedFrames(self._post)
        self._store = store
        self._early: deque[tuple[Any, Sequence[Any]]] = deque()
        """what the kernel has said before it was known here that it lets us in"""
        self._admitted = False
        self._identity = b"m" + secrets.token_bytes(15)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]

    def connect(self, say: Callable[[str], None], over: Callable[[], str]) -> Admitted:
        """Join. Raises `UsageError` where the kernel cannot be reached or lets nobody in, or once `over` says why."""
        began, where = time.monotonic(), f"{' or '.join(self.ticket.addresses)}, port {self.ticket.port}"
        while True:
            for address in _reachable(self.ticket.addresses, self.ticket.port):
                if self._shake_hands(address):
                    return self._join(over)
            if self.ticket.expires < time.time() or time.monotonic() - began > ALONE:
                raise UsageError(
                    f"the notebook cannot be reached at {where}. Has it ended, or does a firewall stand between? "
                    "NBTRAIN_ADDRESS and NBTRAIN_PORT, set before Jupyter starts, name an address and a port that this "
                    "machine can reach"
                )
            say(f"no answer from {where}; trying again (a notebook that was restarted has another ticket)")
            time.sleep(PAUSE)
            if why := over():
                raise UsageError(why)

    def _shake_hands(self, address: str) -> bool:
        made = self._socket = self._context.socket(zmq.DEALER)
        made.routing_id = self._identity
        made.curve_serverkey = self.ticket.kernel_key.encode()
        made.curve_publickey = self.ticket.public_key.encode()
        made.curve_secretkey = self.ticket.secret_key.encode()
        made.sndhwm = made.rcvhwm = 0  # `NumberedFrames` has a limit of its own
        made.maxmsgsize = LONGEST
        made.linger = LINGER
        made.reconnect_ivl, made.reconnect_ivl_max = 50, 1000
        self._monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        made.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{self.ticket.port}")
        if self._monitor.poll(int(1000 * FOUND)):
            self._monitor.recv_multipart()
            self.address = address
            return True
        made.disable_monitor()
        made.close(0)
        return False

    def _join(self, over: Callable[[], str]) -> Admitted:
        began = time.monotonic()
        while True:
            # Made anew each time: it says what this machine's clock shows.
            own = address_towards(self.address, self.ticket.port) or self.address
            machine = this_machine(own, self.address, self._store)
            self.frames.urge(*join_message.written(Join(machine=machine)))
            self._socket.poll(int(1000 * FOUND))
            for said, data in self.received():
                if isinstance(said, Admitted):
                    self._admitted = True
                    return said
                if isinstance(said, Refused):
                    raise UsageError(said.reason)
                if said is not None:  # the word that it was admitted is lost, and this would not come again
                    self._early.append((said, data))
            if why := over():
                raise UsageError(why)
            if time.monotonic() - began > ALONE:
                raise UsageError(f"the notebook at {self.address} lets nobody in: it has said nothing for {ALONE:g} s")

    def received(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """What the kernel has said, and what came along, until there is no more. Signs of life say None."""
        while self._early and self._admitted:
            yield self._early.popleft()
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            content = self.frames.heard([part.buffer for part in parts])
            yield (pickle.loads(content[0]), content[1:]) if content else (None, ())

    def send(self, said: Any, *data: Frame) -> None:
        """`beat` and `pump` of the frames have it leave."""
        self.frames.send(pickle.dumps(said, 5), *data)

    def catch_up(self) -> None:
        """Where the connection is a new one, send what may have been lost with the old one."""
        if self._monitor.poll(0):
            self._monitor.recv_multipart()
            self.frames.again()

    def fileno(self) -> int:
        """It becomes readable when something has changed: there may be something to receive already."""
        return int(self._socket.getsockopt(zmq.FD))

    def wait(self, seconds: float) -> bool:
        """Whether there is something to receive."""
        if not seconds:
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return bool(self._socket.poll(int(1000 * seconds)))

    def close(self, last: Any) -> None:
        """`last`: what is said as it ends."""
        if self.address:
            self.frames.urge(pickle.dumps(last, 5))
        self._context.destroy(LINGER)

    def _post(self, parts: Sequence[Frame]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


def _reachable(addresses: Sequence[str], port: int) -> list[str]:
    """Those of the kernel's addresses where somebody listens, the likeliest first. All are tried at once: who asks for
    one that leads nowhere waits long."""
    answered = dict.fromkeys(addresses, False)

    def knock(address: str) -> None:
        with suppress(OSError), socket.create_connection((address, port), FOUND):
            answered[address] = True

    threads = [threading.Thread(target=knock, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    until = time.monotonic() + FOUND
    for thread in threads:
        # One that answers is waited for; what has not answered by then is slower than it.
        thread.join(0.2 if any(answered.values()) else max(0.0, until - time.monotonic()))
    return [address for address in addresses if answered[address]]
