"""Many machines whose ranks run nothing: they answer at once, or go on until they are stopped. What is left is the
kernel's work and the nodes'. All nodes are threads of one process.

    python -m tests.support.stub_nodes TICKET COUNT

with stub_machines(kernel, 32):             # for a notebook, in processes of their own
    kernel.run("%%distributed --engine elastic --nodes 32 --devices 8\\n...")
with stub_nodes(lobby().ticket(), 2):       # for a lobby in the test itself
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import zmq

from nbtrain.base.events import Event, Failed, Finished, RankState
from nbtrain.base.messages import Conclude, RunCell
from nbtrain.base.specs import PoolSpec
from nbtrain.engines._local import directory
from nbtrain.engines.base import Death, Frame, Share
from nbtrain.engines.remote.node import Node
from nbtrain.engines.remote.ticket import Ticket
from nbtrain.exchange.kinds.base import ParcelContent
from nbtrain.exchange.parcel import HomeParcel, Parcel, dump
from nbtrain.worker.loop.shared_board import OPEN, STEPS, STOP, TARGET, UNKNOWN, OwnedBoard
from tests.support.kernels import Kernel
from tests.support.machines import ticket_of

FOREVER = "FOREVER"
"""in a cell's code: its ranks step a hundred times a second until they are stopped"""


class StubPool:
    """The ranks of one machine."""

    def __init__(self, spec: PoolSpec, body: Any, share: Share, environ: Mapping[str, str]) -> None:
        self.spec, self.ranks, self.environ = spec, share.ranks, dict(environ)
        self.directory = directory.make()
        self.board = OwnedBoard(spec.world_size, self.directory)
        self._poller = zmq.Poller()
        self._heard: queue.SimpleQueue[Event | Death] = queue.SimpleQueue()
        self._running: int | None = None
        self._steps = 0
        for info in self.ranks:
            self._heard.put(RankState(rank=info.rank, time=time.time(), state="ready"))

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def send(self, message: Any, ranks: Iterable[int]) -> None:
        if isinstance(message, Conclude):
            for rank in ranks:
                home = _nothing() if rank == message.lead else None
                self._heard.put(Finished(rank=rank, time=time.time(), steps=self._steps, home=home))
        if not isinstance(message, RunCell):
            return
        for rank in ranks:
            lead = rank == message.ranks[0]
            self._heard.put(RankState(rank=rank, time=time.time(), state="running"))
            self.board.parts[rank][OPEN], self.board.parts[rank][STEPS] = message.number, 0
            if FOREVER not in message.code:
                self._heard.put(Finished(rank=rank, time=time.time(), steps=0, home=_nothing() if lead else None))
        self._running, self._steps = (message.number, 0) if FOREVER in message.code else (None, 0)

    def poll(self, seconds: float) -> list[Event | Death]:
        if self._heard.empty():
            self._poller.poll(int(1000 * min(seconds, 0.01 if self._running is not None else seconds)))
        if self._running is not None:
            self._step(self._running)
        found = []
        while not self._heard.empty():
            found.append(self._heard.get())
        return found

    def _step(self, number: int) -> None:
        head = self.board.head
        if head[STOP] == number:
            if head[TARGET] == UNKNOWN:
                return
            if self._steps >= head[TARGET]:
                self._running = None
                for info in self.ranks:
                    self.board.parts[info.rank][OPEN] = -number
                    self._heard.put(Failed(
                        rank=info.rank, time=time.time(), name="KeyboardInterrupt", text="", lines=(), interrupted=True,
                        between=True, whole=True, steps=self._steps, calls=self._steps,
                    ))  # fmt: skip
                return
        self._steps += 1
        for info in self.ranks:
            self.board.parts[info.rank][STEPS] = self._steps

    def regroup(self, anew: Iterable[int], store: str = "") -> None:
        for info in self.ranks:
            self._heard.put(RankState(rank=info.rank, time=time.time(), state="ready"))

    def interrupt(self, ranks: Iterable[int]) -> None:
        pass

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[Frame]]:
        return {}

    def pids(self) -> dict[int, int]:
        return {info.rank: os.getpid() for info in self.ranks}

    def kill(self, ranks: Collection[int] | None = None) -> None:
        pass

    def close(self, *, kill: bool = False) -> None:
        self.board.close()
        directory.remove(self.directory)


def _nothing() -> HomeParcel:
    return HomeParcel(Parcel(dump(ParcelContent()), b"", (), {}), (), (), ())


class StubNode(Node):
    make_pool = StubPool  # type: ignore[assignment]

    def run(self) -> int:
        self._take_part(1)
        return 0


@contextmanager
def stub_nodes(ticket: Ticket, count: int) -> Iterator[list[StubNode]]:
    """They end with their notebook, or with this block."""
    nodes = [StubNode(ticket, lambda line: None) for _ in range(count)]
    threads = [threading.Thread(target=node.run) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield nodes
    finally:
        for node in nodes:
            node._end("the test is over")
        for thread in threads:
            thread.join()


@contextmanager
def stub_machines(kernel: Kernel, count: int, processes: int = 1) -> Iterator[None]:
    """So many, on their way to the notebook, which must have nbtrain loaded."""
    command = [sys.executable, "-m", "tests.support.stub_nodes", ticket_of(kernel)]
    started = [subprocess.Popen([*command, str(count // processes)]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    with stub_nodes(Ticket.read(sys.argv[1]), int(sys.argv[2])) as nodes:
        while not all(node._over for node in nodes):
            time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main()
