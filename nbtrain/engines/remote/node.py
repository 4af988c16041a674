"""A machine's end: `python -m nbtrain node TICKET`. It joins the notebook that gave the ticket, has the ranks of this
machine as a local pool has them, and speaks with the kernel for all of them.

Where the connection drops, the ranks go on: what they say is kept, and arrives when it is there again.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from nbtrain.base.errors import DeviceError, PoolError, UsageError
from nbtrain.base.events import Event, Failed, Finished
from nbtrain.base.messages import KernelEnvironment, RunCell
from nbtrain.engines._local import warm
from nbtrain.engines.base import Death, Share
from nbtrain.engines.local import LocalPool
from nbtrain.engines.remote import mirrored_board, protocol
from nbtrain.engines.remote.node_channel import ALONE, KernelConnection
from nbtrain.engines.remote.notebook_environ import lies_in
from nbtrain.engines.remote.parcels_over_wire import KERNEL, Copies, parcel_of, stretches
from nbtrain.engines.remote.same_machine import APART
from nbtrain.engines.remote.ticket import Ticket
from nbtrain.machine.leases import Lease
from nbtrain.worker.loop.shared_board import VISIBLE

NOT_SEEN = (
    "the notebook can open this node's memory, and the node not the notebook's (other rights?): "
    f"set {APART}=1 where the node starts"
)
MANY = 256
"""Messages after which the node does what else there is to do, though more may wait."""
PRESSED = "its node was ended by Ctrl-C"


class Node:
    """This machine, in one notebook's pool."""

    make_pool = LocalPool

    def __init__(self, ticket: Ticket, say: Callable[[str], None] = print) -> None:
        self._ticket, self._say = ticket, say
        self._pool: LocalPool | None = None
        self._copies: Copies | None = None
        self._outgoing: mirrored_board.Outgoing | None = None
        self._lease: Lease | None = None
        """of the cards of its ranks"""
        self._generation = 0
        self._beside = False
        """it is the kernel's own machine"""
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
        self._given_up = False
        """by the notebook, which had not heard of it for long: it may come again"""

    def run(self) -> int:
        """Take part until the notebook ends; returns the exit status. Raises `UsageError` where it lets nobody in."""
        warm.foresee(notebook_elsewhere=True)  # it imports torch while this process does
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end(f"ended by {signal.Signals(_[0]).name}"))
        try:
            self._store = _own_store()
            self._take_part(self._store.port)
        except KeyboardInterrupt:
            self._end(PRESSED)
        finally:
            warm.close()
        self._say(self._over)
        return int(self._given_up)

    def _take_part(self, store: int) -> None:
        """`store`: the port at which process groups meet, if rank 0 is here."""
        self._kernel = KernelConnection(self._ticket, store)
        try:
            admitted = self._kernel.connect(self._say, lambda: self._over)
            self._clock, self._prefixes = time.monotonic_ns() - admitted.clock, admitted.prefixes
            at = f"{self._kernel.address}:{self._ticket.port}"
            self._say(f"joined the notebook at {at}; waiting for work (Ctrl-C leaves)")
            self._serve()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice, it must not leave the ranks behind
            self._end(PRESSED)
        finally:
            self._stop(kill=True)
            self._kernel.close(protocol.Leave(reason=self._over))

    def _end(self, why: str) -> None:
        self._over = self._over or why

    # -- the loop ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        due = alone = time.monotonic()
        while not self._over:
            wait = min(protocol.ALERT if self._busy else protocol.BEAT, max(0.0, due - time.monotonic()))
            if self._settles is not None:
                wait = min(wait, max(0.0, self._settles[1] - time.monotonic()))
            began = time.monotonic()
            heard = self._poll(wait)
            now = time.monotonic()
            if now - began - wait > protocol.ASLEEP:  # the kernel was not heard, as nobody listened
                alone += now - began
            if self._listen():
                alone = now
            self._pass_on(heard)
            if self._kernel.frames.idle or self._settles is not None:  # else it would be told faster than it listens
                self._tell_board()
            if now >= due:
                due = now + protocol.BEAT
                self._kernel.frames.beat()
                self._tell_pids()
                self._kernel.catch_up()
                if now - alone > ALONE:
                    self._end(f"the notebook has said nothing for {ALONE:g} s")
            self._kernel.frames.pump()

    def _poll(self, seconds: float) -> list[Event | Death]:
        pool = self._pool
        if pool is None:
            self._kernel.wait(seconds)
            return []
        if self._kernel.wait(0):  # its descriptor tells of changes only
            seconds = 0.0
        try:
            return pool.poll(seconds)
        except PoolError as error:
            return self._lose(pool, error)

    def _lose(self, pool: LocalPool, error: PoolError) -> list[Event | Death]:
        """The pool cannot go on: what its ranks are forked from is gone, or one takes no message."""
        pids, why = self._told_pids, str(error).partition("\n")[0]
        self._stop(kill=True)
        return [Death(rank=info.rank, pid=pids.get(info.rank, 0), signal=None, code=1, said=why) for info in pool.ranks]

    def _listen(self) -> bool:
        """Do what the kernel says; whether it has said anything."""
        spoke = False
        for said, data in islice(self._kernel.received(), MANY):
            spoke = True
            if said is not None:
                self._do(said, data)
            if self._over:
                break
        return spoke

    # -- what the kernel says -----------------------------------------------------------------------

    def _do(self, said: Any, data: Sequence[Any]) -> None:
        if isinstance(said, protocol.Leave | protocol.Refused):
            self._given_up = isinstance(said, protocol.Refused)
            self._end(said.reason)
        elif isinstance(said, protocol.StartRanks):
            self._start(said)
        elif isinstance(said, protocol.Admitted):
            return  # once more
        elif said.generation != self._generation or self._pool is None or self._copies is None:
            if isinstance(said, protocol.EndRanks):
                self._kernel.send(protocol.Processes(generation=said.generation, pids={}))
        else:
            pool = self._pool
            try:
                self._do_with(pool, self._copies, said, data)
            except PoolError as error:
                self._pass_on(self._lose(pool, error))

    def _do_with(self, pool: LocalPool, copies: Copies, said: Any, data: Sequence[Any]) -> None:
        if isinstance(said, protocol.Deliver):
            message = pickle.loads(data[0])
            message = message if self._beside else copies.placed(message, KERNEL, said.ranks)
            if isinstance(message, RunCell):
                self._busy.update(said.ranks)
                environment = self._environment(message.environment)
                message = replace(message, sent=time.monotonic(), environment=environment)
            pool.send(message, said.ranks)
        elif isinstance(said, protocol.SegmentBytes):
            copies.write(said, memoryview(data[0]))
        elif isinstance(said, protocol.BoardHead):
            head = pool.board.head.cast("B")
            head[:] = said.words
            if said.asked:
                self._settles = said.asked, time.monotonic() + VISIBLE
        elif isinstance(said, protocol.BoardWords):
            own = {info.rank for info in pool.ranks}
            others = {rank: words for rank, words in said.parts.items() if rank not in own}
            mirrored_board.write(pool.board, others, self._clock)
        elif isinstance(said, protocol.Interrupt):
            pool.interrupt(said.ranks)
        elif isinstance(said, protocol.AskStacks):
            alive = pool.pids()
            stacks = pool.stacks([rank for rank in said.ranks if rank in alive])
            self._kernel.send(
                protocol.Stacks(asked=said.asked, frames={rank: stacks.get(rank, []) for rank in said.ranks})
            )
        elif isinstance(said, protocol.RegroupRanks):
            pool.environ = dict(said.environ)
            for rank in said.anew:
                copies.lost(rank)
                self._busy.discard(rank)
            pool.regroup(said.anew, said.store)
        elif isinstance(said, protocol.KillRanks):
            pool.kill(said.ranks)
        elif isinstance(said, protocol.EndRanks):
            self._stop(kill=said.kill)
            self._kernel.send(protocol.Processes(generation=said.generation, pids={}))

    def _start(self, said: protocol.StartRanks) -> None:
        self._stop(kill=True)
        self._generation, self._beside = said.generation, said.beside is not None
        share = Share(ranks=said.ranks, store=said.store, address=said.address, master=said.master)
        try:
            if said.beside is not None and not said.beside.holds_here():
                raise PoolError(NOT_SEEN)
            self._pool = self.make_pool(said.spec, None, share, said.environ)
        except Exception as error:  # no room for sockets, no file left: the kernel is to say so
            self._kernel.send(protocol.Heard(generation=said.generation, events=tuple(
                Death(rank=info.rank, pid=0, signal=None, code=1, said=f"{type(error).__name__}: {error}")
                for info in said.ranks
            )))  # fmt: skip
            return
        self._lease = _leased([uuid for info in said.ranks for uuid in said.spec.uuids[info.rank : info.rank + 1]])
        self._pool.watch(self._kernel.fileno())
        self._copies = Copies(self._pool.directory)
        self._outgoing = mirrored_board.Outgoing(self._pool.board, [info.rank for info in said.ranks], said.again)
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
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _environment(self, told: KernelEnvironment) -> KernelEnvironment:
        """The kernel's environment, as far as it is to be this machine's: what is installed is found in its own
        folders, and a folder that is not here is left out."""
        path, directory, environ = told.path, told.directory, told.environ
        if path is not None:
            theirs = [
                entry
                for entry in path
                if not lies_in(entry, self._prefixes) and os.path.exists(entry) and entry not in sys.path
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
            parcel = None if self._beside else parcel_of(event)
            if parcel is not None and not isinstance(event, Death):
                for what, content in stretches(parcel, self._generation, event.rank):
                    self._kernel.send(what, content)
        self._tell_board()  # before the end of a cell is told, how it ended
        self._kernel.send(protocol.Heard(generation=self._generation, events=tuple(heard)))
        self._tell_pids()

    def _tell_board(self) -> None:
        if self._outgoing is None:
            return
        settled = 0
        if self._settles is not None and time.monotonic() >= self._settles[1]:
            settled, self._settles = self._settles[0], None
        parts = self._outgoing.changes()
        if parts or settled:
            self._kernel.send(protocol.BoardWords(generation=self._generation, parts=parts, settled=settled))

    def _tell_pids(self) -> None:
        pids = self._pool.pids() if self._pool is not None else {}
        if pids != self._told_pids:
            self._told_pids = pids
            self._kernel.send(protocol.Processes(generation=self._generation, pids=pids))


def _leased(cards: Sequence[str]) -> Lease | None:
    """A lease of these cards, for notebooks on this machine that look for free ones (`--devices auto`). It refuses
    nothing: the user has said which machines and cards are to be used."""
    with suppress(DeviceError):  # there is no place for leases
        lease = Lease()
        for card in cards:
            lease.add(card)
        return lease
    return None


def _own_store() -> Any:
    """Where process groups meet whose rank 0 is on this machine. It lives as long as the node: each group has a name
    of its own there."""
    import torch.distributed as dist

    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


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
