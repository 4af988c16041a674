"""Ranks on several machines, as the session sees them: a pool like any other."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.events import Event, Failed, Finished
from nbtrain.base.messages import Message, Pull, Regroup, RunCell
from nbtrain.base.specs import MachinesWanted, PoolSpec, RankInfo
from nbtrain.engines._local import directory
from nbtrain.engines.base import Death, Frame
from nbtrain.engines.remote import machines, mirrored_board, protocol
from nbtrain.engines.remote.doors import Door, entrance
from nbtrain.engines.remote.lobby import Lobby, Peer, lobby
from nbtrain.engines.remote.notebook_environ import set_in_notebook
from nbtrain.engines.remote.parcels_over_wire import KERNEL, Copies, parcel_of, stretches
from nbtrain.engines.remote.same_machine import own_proof

ANSWER = 2.0
"""Seconds in which a machine answers what it is asked at once."""
GRACE = 4.0
"""Seconds in which machines end their ranks."""
AGAIN = 0.5
"""Seconds after which the board's head is told once more."""
SPREAD = 0.03
"""Seconds between two frames with what the ranks of other machines have written."""
MOMENT = 0.3
"""Seconds after which the end of a machine's node has been noticed."""
Places = dict[int, set[bytes]]
"""rank → places of its part of the board"""
_generations = 0


class RemotePool:
    """The ranks of several machines."""

    door: Callable[[MachinesWanted], Door] | None = None
    """what starts their nodes; None: the user does"""

    def __init__(self, spec: PoolSpec) -> None:
        global _generations
        _generations += 1
        self.spec = spec
        self._generation = _generations
        self._groups_formed = 0
        self._closed = False
        self._lobby: Lobby = lobby()
        self._entrance = entrance(self._lobby, spec.engine, self.door, spec.machines)
        self._heard: queue.SimpleQueue[Event | Death | None] = queue.SimpleQueue()
        self._pids: dict[int, dict[int, int]] = {}
        """machine → rank → process; a machine that has not said is missing"""
        self._busy: set[int] = set()
        """ranks that run a cell"""
        self._held: list[tuple[float, Failed]] = []
        """errors that may be due to a machine that is lost, which is known a moment later, and when they came"""
        self._fresh: Places = {}
        """what the other machines have not been told"""
        self._late: dict[int, Places] = {}
        """machine → what it was not told with the others"""
        self._spread_at = 0.0
        self._stacks: dict[int, dict[int, list[Frame]]] = {}
        self._asked = 0
        self._said = threading.Condition()
        """notified when a machine has answered"""
        here = self._entrance.wait(spec.nodes)
        each = spec.world_size // spec.nodes
        self._places: list[Peer | None] = list(here)
        """node → the machine"""
        self.ranks = tuple(
            RankInfo(
                rank=rank, world_size=spec.world_size, local_rank=rank % each, device=device, nodes=spec.nodes,
                threads=machines.threads(here[rank // each].machine, each),
            )
            for rank, device in enumerate(spec.devices)
        )  # fmt: skip
        self.directory = directory.make()
        directory.mark(self.directory)
        self.board = mirrored_board.MirroredBoard(spec.world_size, self.directory, self._started, self._lobby.wake)
        self._copies = Copies(self.directory)
        self._asked_of: dict[int, int] = {}
        """machine → the last request to settle that it was told of"""
        self._told: dict[int, tuple[bytes, float]] = {}
        """machine → the board's head as it was told, and when"""
        self._lobby.listener = self
        self._start(range(spec.nodes), self._new_store())

    def _nodes(self) -> list[int]:
        """Those whose machines are there."""
        return [node for node, peer in enumerate(self._places) if peer is not None]

    def _started(self) -> list[int]:
        """Those of them whose ranks there are: what is urgent would overtake the word to start them."""
        return [node for node in self._nodes() if node in self._pids]

    # -- starting -----------------------------------------------------------------------------

    def _start(self, nodes: Iterable[int], store: str, again: bool = False) -> None:
        addresses = self._addresses()
        for node in nodes:
            ranks = tuple(info for info in self.ranks if info.node == node)
            peer = self._places[node]
            self._say(node, protocol.StartRanks(
                generation=self._generation, spec=self.spec, ranks=ranks, store=store, address=addresses[node],
                master=addresses[0], environ=set_in_notebook(), again=again,
                beside=own_proof() if peer is not None and peer.beside else None,
            ))  # fmt: skip
        self._lobby.wake()

    def _addresses(self) -> list[str]:
        """Of each machine, for the others. One that is on the kernel's own speaks with it within; the others reach it
        where they reach the kernel."""
        addresses = [peer.machine.address if peer is not None else "" for peer in self._places]
        out = [peer for peer in self._places if peer is not None and not _within(peer.machine.address)]
        return [out[0].machine.dialed if out and _within(address) else address for address in addresses]

    def _new_store(self) -> str:
        """Where the next process group meets: at rank 0's machine, under a name of its own for each."""
        self._groups_formed += 1
        first = self._places[0]
        port = first.machine.store if first is not None else 0
        return f"tcp://{self._addresses()[0]}:{port}/{self._generation}-{self._groups_formed}"

    def regroup(self, anew: Iterable[int]) -> None:
        gone = set(anew)
        empty = [node for node, peer in enumerate(self._places) if peer is None]
        for node, peer in zip(empty, self._entrance.wait(len(empty), self._places), strict=True):
            self._places[node] = peer
        if self.spec.kind == "cuda" and empty:
            self.spec = replace(self.spec, uuids=tuple(map(self._card, self.ranks)))
        store = self._new_store()
        for rank in gone:
            self._copies.forget(rank)
            self._busy.discard(rank)
        # Where none is left, what they were started from may be gone, too: such a machine begins anew.
        mine = {node: {info.rank for info in self.ranks if info.node == node} for node in self._nodes()}
        for node in [node for node, ranks in mine.items() if node in empty or ranks <= gone]:
            self._pids.pop(node, None)
            self._told.pop(node, None)
            ranks = mine.pop(node)
            self._start([node], store, again=True)
            others = [info.rank for info in self.ranks if info.rank not in ranks]
            known = mirrored_board.everything(self.board, others)  # it is to know what they have entered
            self._say(node, protocol.BoardWords(generation=self._generation, parts=known))
        for node, ranks in mine.items():
            lost = tuple(ranks & gone)
            self._say(node, protocol.RegroupRanks(
                generation=self._generation, anew=lost, store=store, environ=set_in_notebook()
            ))  # fmt: skip
        self._lobby.wake()

    def _card(self, info: RankInfo) -> str:
        """The one that a rank's device is on its machine, which may be another than the one that was there first."""
        peer, known = self._places[info.node], self.spec.uuids[info.rank]
        cards = peer.machine.here.cards() if peer is not None else ()
        at = int(info.device.partition(":")[2] or 0)
        return cards[at].uuid if at < len(cards) else known

    def _say(self, node: int, said: Any) -> None:
        if (peer := self._places[node]) is not None:
            self._lobby.send(peer, said)

    # -- talking ------------------------------------------------------------------------------

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        if isinstance(message, RunCell | Pull):
            for rank, numbers in message.released.items():
                self._copies.released(rank, numbers)
        if isinstance(message, RunCell):
            self._busy.update(ranks)
            if message.environment.environ is not None:
                message = replace(message, environment=replace(message.environment, environ=set_in_notebook()))
        assert not isinstance(message, Regroup)
        data = pickle.dumps(message, 5)
        parcel = parcel_of(message)
        for peer, those in self._by_machine(ranks):
            if parcel is not None and not peer.beside:
                for what, content in stretches(parcel, self._generation, KERNEL):
                    self._lobby.send(peer, what, content)
            self._lobby.send(peer, protocol.Deliver(generation=self._generation, ranks=those), data)
        self._lobby.wake()

    def _by_machine(self, ranks: Iterable[int]) -> list[tuple[Peer, tuple[int, ...]]]:
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.ranks[rank].node, []).append(rank)
        return [(peer, tuple(those)) for node, those in by_node.items() if (peer := self._places[node]) is not None]

    def poll(self, seconds: float) -> list[Event | Death]:
        news: list[Event | Death] = []
        if not self._busy:  # a cell would be sent to a machine that is going
            patience = AwakeTimeout(GRACE)
            while any(peer is not None and peer.unreachable is not None for peer in self._places) and not patience.over:
                time.sleep(0.01)
        wait: float | None = seconds
        while True:
            try:
                event = self._heard.get(bool(wait), wait) if wait else self._heard.get_nowait()
            except queue.Empty:
                return news
            wait = None
            if event is not None:
                news.append(event)

    def wake(self) -> None:
        self._heard.put(None)

    def interrupt(self, ranks: Iterable[int]) -> None:
        for peer, those in self._by_machine(ranks):
            self._lobby.send(peer, protocol.Interrupt(generation=self._generation, ranks=those))
        self._lobby.wake()

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[Frame]]:
        with self._said:
            self._asked += 1
            asked, awaited = self._asked, 0
            for peer, those in self._by_machine(ranks):
                self._lobby.send(peer, protocol.AskStacks(generation=self._generation, asked=asked, ranks=those))
                awaited += len(those)
            self._stacks = {asked: {}}
            self._lobby.wake()
            self._said.wait_for(lambda: len(self._stacks[asked]) >= awaited, ANSWER)
            return {rank: frames for rank, frames in self._stacks.pop(asked).items() if frames}

    def alive(self) -> set[int]:
        return {rank for those in list(self._pids.values()) for rank in those}

    def pids(self) -> dict[int, int]:
        return {}

    def spare(self) -> int:
        """Machines that have joined and have no ranks."""
        return sum(peer not in self._places for peer in self._entrance.machines())

    def place(self, rank: int) -> str:
        node = self.ranks[rank].node
        peer, pid = self._places[node], self._pids.get(node, {}).get(rank)
        return f"process {pid} on {peer.machine.name}" if peer is not None and pid is not None else ""

    def kill(self, ranks: Collection[int] | None = None) -> None:
        for peer, those in self._by_machine(self.alive() if ranks is None else ranks):
            self._lobby.send(peer, protocol.KillRanks(generation=self._generation, ranks=those))
        self._lobby.wake()

    def close(self, *, kill: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._pids = {node: those for node, those in self._pids.items() if those}
            for node in self._nodes():
                self._say(node, protocol.EndRanks(generation=self._generation, kill=kill))
            self._lobby.wake()
            patience = AwakeTimeout(GRACE)
            with self._said:
                while not patience.over and any(self._pids.get(node, True) for node in self._nodes()):
                    self._said.wait(0.05)
        finally:
            self._let_go()
            self.board.close()
            self._copies.close()
            directory.remove(self.directory)

    def _let_go(self) -> None:
        """Returns once the lobby's thread looks at nothing of this pool's any more."""
        done = threading.Event()

        def let_go() -> None:
            self._lobby.listener = None
            done.set()

        self._lobby.soon(let_go)
        done.wait(ANSWER)

    # -- in the lobby's thread ------------------------------------------------------------------

    def hear(self, peer: Peer, said: Any, data: Sequence[Any]) -> None:
        node = next((node for node, other in enumerate(self._places) if other is peer), None)
        if node is None or getattr(said, "generation", self._generation) != self._generation:
            return
        if isinstance(said, protocol.Heard):
            for event in said.events:
                self._note(event)
        elif isinstance(said, protocol.SegmentBytes):
            self._copies.write(said, memoryview(data[0]))
        elif isinstance(said, protocol.BoardWords):
            mirrored_board.write(self.board, said.parts, peer.clock)
            for rank, (places, _) in said.parts.items():
                self._fresh.setdefault(rank, set()).add(places)
            if said.settled:
                self.board.settled_on(node, said.settled)
        elif isinstance(said, protocol.Processes):
            with self._said:
                self._pids[node] = dict(said.pids)
                self._said.notify_all()
        elif isinstance(said, protocol.Stacks):
            with self._said:
                self._stacks.get(said.asked, {}).update(said.frames)
                self._said.notify_all()

    def _note(self, event: Event | Death) -> None:
        if isinstance(event, Failed) and event.rank in self._busy and _broken(event):
            self._held.append((time.monotonic(), event))
            return
        self._tell(event)

    def _tell(self, event: Event | Death) -> None:
        if isinstance(event, Death | Failed | Finished):
            self._busy.discard(event.rank)
        if isinstance(event, Death):
            self._copies.forget(event.rank)
            if (peer := self._places[self.ranks[event.rank].node]) is not None:
                event = replace(event, limit=peer.machine.memory)
        peer = self._places[self.ranks[event.rank].node]
        self._heard.put(event if peer is not None and peer.beside else self._copies.placed(event, event.rank))

    def lose(self, peer: Peer, why: str) -> None:
        if peer not in self._places:
            return
        node = self._places.index(peer)
        self._places[node] = None
        self._late.pop(node, None)
        pids = self._pids.pop(node, {})
        for info in self.ranks:
            if info.node == node:
                self._note(Death(
                    rank=info.rank, pid=pids.get(info.rank, 0), signal=None, code=None, machine=peer.machine.name,
                    said=why,
                ))  # fmt: skip
        with self._said:
            self._said.notify_all()
        self.board.settled_on(node, self.board.asked)
        self._release(0.0)

    def turn(self) -> bool:
        """Tell the machines what the kernel has written on the board; while a cell runs again and again, as what is
        urgent may be lost."""
        words, now = bytes(self.board.head.cast("B")), time.monotonic()
        for node in self._started():
            peer, (told, at) = self._places[node], self._told.get(node, (b"", 0.0))
            asked = self.board.awaited(node)
            due = told != words or ((asked or self._busy) and now - at > AGAIN)
            if peer is not None and (due or asked > self._asked_of.get(node, 0)):
                said = protocol.BoardHead(generation=self._generation, words=words, asked=asked)
                if peer.frames.urge(pickle.dumps(said, 5)):
                    self._told[node], self._asked_of[node] = (words, now), asked
        if (self._fresh or self._late) and time.monotonic() - self._spread_at > SPREAD:
            self._spread()
        if self._held and all(peer is None or peer.unreachable is None for peer in self._places):
            self._release(MOMENT)
        return bool(self._busy)

    def _spread(self) -> None:
        """Tell the machines what ranks have written: one frame, pickled once for all of them, which pass over their
        own ranks'. One that has yet to receive what it was sent is told later, or Stop would wait behind that."""
        self._spread_at = time.monotonic()
        fresh, self._fresh = self._fresh, {}
        data = self._words(fresh)
        for node in self._nodes():
            peer, late = self._places[node], self._late.pop(node, None)
            if peer is None:
                continue
            if late is None and peer.frames.idle:
                if any(self.ranks[rank].node != node for rank in fresh):
                    peer.frames.send(data)
                continue
            late = late or {}
            for rank, places in fresh.items():
                late.setdefault(rank, set()).update(places)
            if peer.frames.idle:
                peer.frames.send(self._words(late))
            else:
                self._late[node] = late

    def _words(self, places: Places) -> bytes:
        said = protocol.BoardWords(generation=self._generation, parts=mirrored_board.as_here(self.board, places))
        return pickle.dumps(said, 5)

    def _release(self, age: float) -> None:
        """Tell of broken connections: it is known by now which machine they led to, or that all are there."""
        while self._held and time.monotonic() - self._held[0][0] >= age:
            self._tell(self._held.pop(0)[1])


def _broken(failed: Failed) -> bool:
    """Whether a rank says that it has lost another."""
    return failed.name in ("RuntimeError", "DistBackendError", "ConnectionError") and "onnection" in failed.text


def _within(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
