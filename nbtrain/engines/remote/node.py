"""A machine's end: `python -m nbtrain node TICKET`. It joins the notebook that gave the ticket, has the ranks of this
machine as a local pool has them, and speaks with the kernel for all of them.

Where the connection drops, the ranks go on: what they say is kept, and arrives when it is there again.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq

from nbtrain.engines._local import warm
from nbtrain.engines.base import Death, Share
from nbtrain.engines.local import LocalPool
from nbtrain.engines.remote import mirrored_board
from nbtrain.engines.remote.machines import this_machine
from nbtrain.engines.remote.numbered_frames import Frame, NumberedFrames
from nbtrain.engines.remote.parcels_over_wire import KERNEL, Copies, parcel_of, stretches
from nbtrain.engines.remote.protocol import (
    Admitted,
    AskStacks,
    BoardHead,
    BoardWords,
    Deliver,
    EndRanks,
    Heard,
    Interrupt,
    Join,
    KillRanks,
    Leave,
    Processes,
    Refused,
    RegroupRanks,
    SegmentBytes,
    Stacks,
    StartRanks,
)
from nbtrain.engines.remote.ticket import Ticket
from nbtrain.errors import PoolError, UsageError
from nbtrain.events import Event, Failed, Finished
from nbtrain.messages import KernelEnvironment, RunCell
from nbtrain.training.loop.shared_board import VISIBLE

BEAT = 0.5
"""Seconds between two signs of life."""
ALERT = 0.01
"""Seconds between two looks at the board while a cell runs."""
FOUND = 5.0
"""Seconds in which one of the kernel's addresses should answer, before the next is tried."""
PAUSE = 1.0
"""Seconds between two attempts to reach the kernel."""
ASLEEP = 5.0
"""Seconds without a turn after which the machine itself has been asleep."""
ALONE = float(os.environ.get("NBTRAIN_NODE_PATIENCE", "600"))
"""Seconds without a word of the kernel after which the ranks are ended."""


class Node:
    """This machine, in one notebook's pool."""

    make_pool = LocalPool

    def __init__(self, ticket: Ticket, say: Callable[[str], None] = print) -> None:
        self.ticket = ticket
        self._say = say
        self._context = zmq.Context()
        self._pool: LocalPool | None = None
        self._copies: Copies | None = None
        self._outgoing: mirrored_board.Outgoing | None = None
        self._generation = 0
        self._busy: set[int] = set()
        """ranks that run a cell"""
        self._settles: tuple[int, float] | None = None
        """a request for the ranks' parts, and when ranks can see the head that came with it"""
        self._told_pids: dict[int, int] = {}
        self._prefixes: tuple[str, ...] = ()
        self._clock = 0
        """nanoseconds that the kernel's monotonic clock is behind ours"""
        self._over = ""
        """why this node ends"""
        self._refused = False

    def run(self) -> int:
        """Take part until the notebook ends; returns the exit status."""
        warm.foresee()  # it imports torch while this process does
        self._store = _own_store()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end(f"ended by {signal.Signals(_[0]).name}"))
        try:
            self._connect()
            self._say(f"joined the notebook at {self._address}:{self.ticket.port}; waiting for work (Ctrl-C leaves)")
            self._serve()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice, it must not leave the ranks behind
            self._over = self._over or "left"
        finally:
            self._stop(kill=True)
            with suppress(AttributeError):
                self._frames.urge(pickle.dumps(Leave(reason=self._over), 5))
            self._context.destroy(500)
            warm.close()
        self._say(self._over)
        return int(self._refused)

    def _end(self, why: str) -> None:
        self._over = self._over or why

    # -- connecting -----------------------------------------------------------------------------

    def _connect(self) -> None:
        identity, began = b"m" + secrets.token_bytes(15), time.monotonic()
        while True:
            for address in _reachable(self.ticket.addresses, self.ticket.port):
                if self._try(address, identity):
                    return
            if self.ticket.expires < time.time() or time.monotonic() - began > ALONE:
                raise UsageError(
                    f"the notebook is not to be reached at {' or '.join(self.ticket.addresses)}, port "
                    f"{self.ticket.port}. Does a firewall stand between? NBTRAIN_ADDRESS and NBTRAIN_PORT, set before "
                    "Jupyter starts, name an address and a port that this machine can reach"
                )
            self._say(f"no answer from {' or '.join(self.ticket.addresses)}, port {self.ticket.port}; trying again")
            time.sleep(PAUSE)
            if self._over:  # told to end
                raise UsageError(self._over)

    def _try(self, address: str, identity: bytes) -> bool:
        self._socket = self._context.socket(zmq.DEALER)
        socket_ = self._socket
        socket_.routing_id = identity
        socket_.curve_serverkey = self.ticket.kernel_key.encode()
        socket_.curve_publickey = self.ticket.public_key.encode()
        socket_.curve_secretkey = self.ticket.secret_key.encode()
        socket_.sndhwm = socket_.rcvhwm = 0
        socket_.linger = 500
        socket_.reconnect_ivl, socket_.reconnect_ivl_max = 50, 1000
        self._monitor = socket_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket_.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{self.ticket.port}")
        if not self._monitor.poll(int(1000 * FOUND)):
            socket_.disable_monitor()
            socket_.close(0)
            return False
        self._monitor.recv_multipart()
        self._address, own = address, _own_address(address, self.ticket.port)
        self._frames = NumberedFrames(self._post)
        machine = this_machine(own, address, self._store.port)
        self._join = pickle.dumps(Join(pool=self.ticket.pool, public_key=self.ticket.public_key, machine=machine), 5)
        self._admitted = False
        self._frames.urge(self._join)
        while not self._admitted:
            if not socket_.poll(int(1000 * FOUND)):
                self._frames.urge(self._join)
            self._listen()
            if self._over:
                raise UsageError(self._over)
        return True

    # -- the loop ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        due = alone = time.monotonic()
        while not self._over:
            wait = min(ALERT if self._busy else BEAT, max(0.0, due - time.monotonic()))
            if self._settles is not None:
                wait = min(wait, max(0.0, self._settles[1] - time.monotonic()))
            began = time.monotonic()
            heard = self._poll(wait)
            now = time.monotonic()
            if now - began - wait > ASLEEP:  # the kernel was not heard, as nobody listened
                alone += now - began
            if self._listen():
                alone = now
            self._pass_on(heard)
            self._tell_board()
            if now >= due:
                due = now + BEAT
                self._frames.beat()
                self._tell_pids()
                if self._monitor.poll(0):  # the connection is a new one
                    self._monitor.recv_multipart()
                    self._frames.again()
                if now - alone > ALONE:
                    self._end(f"the notebook has said nothing for {ALONE:g} s")
            self._frames.pump()

    def _poll(self, seconds: float) -> list[Event | Death]:
        pool = self._pool
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # its descriptor tells of changes only
            seconds = 0.0
        if pool is None:
            self._socket.poll(int(1000 * seconds))
            return []
        try:
            return pool.poll(seconds)
        except PoolError as error:
            pool.close(kill=True)
            self._pool = None
            return [Death(rank=info.rank, pid=0, signal=None, code=None, said=str(error)) for info in pool.ranks]

    def _listen(self) -> bool:
        """Do what the kernel says; whether it has said anything."""
        spoke = False
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return spoke
            spoke = True
            content = self._frames.heard([part.buffer for part in parts])
            if content:
                self._do(pickle.loads(content[0]), content[1:])

    def _post(self, parts: Sequence[Frame]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _tell(self, said: Any, *data: Frame) -> None:
        self._frames.send(pickle.dumps(said, 5), *data)

    # -- what the kernel says -----------------------------------------------------------------------

    def _do(self, said: Any, data: Sequence[Any]) -> None:
        if isinstance(said, Admitted):
            if not self._admitted:
                self._admitted = True
                self._clock, self._prefixes = time.monotonic_ns() - said.clock, said.prefixes
        elif isinstance(said, Refused):
            self._refused = True
            self._end(said.reason)
        elif isinstance(said, Leave):
            self._end(said.reason)
        elif isinstance(said, StartRanks):
            self._start(said)
        elif said.generation != self._generation or self._pool is None or self._copies is None:
            if isinstance(said, EndRanks):
                self._tell(Processes(generation=said.generation, pids={}))
        else:
            self._do_with(self._pool, self._copies, said, data)

    def _do_with(self, pool: LocalPool, copies: Copies, said: Any, data: Sequence[Any]) -> None:
        if isinstance(said, Deliver):
            message = copies.placed(pickle.loads(data[0]), KERNEL, said.ranks)
            if isinstance(message, RunCell):
                self._busy.update(said.ranks)
                environment = self._environment(message.environment)
                message = replace(message, sent=time.monotonic(), environment=environment)
            pool.send(message, said.ranks)
        elif isinstance(said, SegmentBytes):
            copies.write(said, memoryview(data[0]))
        elif isinstance(said, BoardHead):
            head = pool.board.head.cast("B")
            head[:] = said.words
            if said.asked:
                self._settles = said.asked, time.monotonic() + VISIBLE
        elif isinstance(said, BoardWords):
            mirrored_board.write(pool.board, said.parts, self._clock)
        elif isinstance(said, Interrupt):
            pool.interrupt(said.ranks)
        elif isinstance(said, AskStacks):
            alive = pool.pids()
            found = pool.stacks([rank for rank in said.ranks if rank in alive])
            self._tell(Stacks(asked=said.asked, frames={rank: found.get(rank, []) for rank in said.ranks}))
        elif isinstance(said, RegroupRanks):
            pool.environ = dict(said.environ)
            for rank in said.anew:
                copies.lost(rank)
                self._busy.discard(rank)
            pool.regroup(said.anew, said.store)
        elif isinstance(said, KillRanks):
            pool.kill(said.ranks)
        elif isinstance(said, EndRanks):
            self._stop(kill=said.kill)
            self._tell(Processes(generation=said.generation, pids={}))

    def _start(self, said: StartRanks) -> None:
        self._stop(kill=True)
        self._generation = said.generation
        share = Share(ranks=said.ranks, store=said.store, address=said.address, master=said.master)
        try:
            self._pool = self.make_pool(said.spec, None, share, said.environ)
        except Exception as error:  # no room for sockets, no file left: the kernel is to say so
            self._tell(Heard(generation=said.generation, events=tuple(
                Death(rank=info.rank, pid=0, signal=None, code=1, said=f"{type(error).__name__}: {error}")
                for info in said.ranks
            )))  # fmt: skip
            return
        self._pool.watch(int(self._socket.getsockopt(zmq.FD)))
        self._copies = Copies(self._pool.directory)
        self._outgoing = mirrored_board.Outgoing(self._pool.board, [info.rank for info in said.ranks])
        count = len(said.ranks)
        self._say(f"{count} rank{'s' * (count > 1)} of {said.spec.world_size}")

    def _stop(self, kill: bool) -> None:
        pool, self._pool = self._pool, None
        self._busy.clear()
        self._settles = None
        self._told_pids = {}
        self._outgoing = None
        if pool is not None:
            pool.close(kill=kill)
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _environment(self, told: KernelEnvironment) -> KernelEnvironment:
        """The kernel's environment, as far as it is to be this machine's: what is installed is found in its own
        folders, and a folder that is not here is left out."""
        path, directory, environ = told.path, told.directory, told.environ
        if path is not None:
            theirs = [
                one for one in path if not _lies_in(one, self._prefixes) and os.path.exists(one) and one not in sys.path
            ]
            path = (*theirs, *sys.path)
        if directory is not None and not os.path.isdir(directory):
            directory = None
        if environ is not None and self._pool is not None:
            self._pool.environ = dict(environ)
            environ = {**os.environ, **environ}
        return replace(told, path=path, directory=directory, environ=environ)

    # -- what its ranks say ---------------------------------------------------------------------------

    def _pass_on(self, heard: list[Event | Death]) -> None:
        if not heard:
            return
        for event in heard:
            if isinstance(event, Death | Failed | Finished):
                self._busy.discard(event.rank)
            if self._copies is not None:
                if isinstance(event, Finished):
                    self._copies.released(KERNEL, event.released, event.rank)
                elif isinstance(event, Death):
                    self._copies.lost(event.rank)
            parcel = parcel_of(event)
            if parcel is not None and not isinstance(event, Death):
                for what, content in stretches(parcel, self._generation, event.rank):
                    self._tell(what, content)
        self._tell_board()  # before the end of a cell is told, how it ended
        self._tell(Heard(generation=self._generation, events=tuple(heard)))
        self._tell_pids()

    def _tell_board(self) -> None:
        if self._outgoing is None:
            return
        settled = 0
        if self._settles is not None and time.monotonic() >= self._settles[1]:
            settled, self._settles = self._settles[0], None
        parts = self._outgoing.changes()
        if parts or settled:
            self._tell(BoardWords(generation=self._generation, parts=parts, settled=settled))

    def _tell_pids(self) -> None:
        pids = self._pool.pids() if self._pool is not None else {}
        if pids != self._told_pids:
            self._told_pids = pids
            self._tell(Processes(generation=self._generation, pids=pids))


def _reachable(addresses: Sequence[str], port: int) -> list[str]:
    """Those of the kernel's addresses where somebody listens, the likeliest first. All are tried at once: who asks for
    one that leads nowhere waits long."""
    found = dict.fromkeys(addresses, False)

    def knock(address: str) -> None:
        with suppress(OSError), socket.create_connection((address, port), FOUND):
            found[address] = True

    threads = [threading.Thread(target=knock, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    until = time.monotonic() + FOUND
    for thread in threads:
        # One that answers is waited for; what has not answered by then is slower than it.
        thread.join(0.2 if any(found.values()) else max(0.0, until - time.monotonic()))
    return [address for address in addresses if found[address]]


def _own_address(kernel: str, port: int) -> str:
    """This machine's address on the way to the kernel. Nothing is sent."""
    family = socket.AF_INET6 if ":" in kernel else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((kernel, port))
        address: str = probe.getsockname()[0]
        return address


def _own_store() -> Any:
    """Where process groups meet whose rank 0 is on this machine. It lives as long as the node: each group has a name
    of its own there."""
    import torch.distributed as dist

    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _lies_in(path: str, folders: Sequence[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def _say(line: str) -> None:
    with suppress(OSError):  # who has started this node may be gone
        print(f"nbtrain: {line}", flush=True)


def main(words: Sequence[str]) -> int:
    """`words`: the ticket; `-` or nothing: it is read from NBTRAIN_TICKET or standard input, where nobody sees it."""
    text = words[0] if words and words[0] != "-" else os.environ.pop("NBTRAIN_TICKET", "") or sys.stdin.readline()
    try:
        return Node(Ticket.read(text), _say).run()
    except UsageError as error:
        print(f"nbtrain: {error}", file=sys.stderr, flush=True)
        return 2
