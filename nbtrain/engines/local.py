"""Ranks as processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import nbtrain.machine.devices as devices
import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.host as host
from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import PoolError, UsageError
from nbtrain.base.events import Event, Failed, Output, RankState
from nbtrain.base.messages import Close, Message, Regroup
from nbtrain.base.specs import PoolSpec, RankInfo
from nbtrain.engines._local import directory
from nbtrain.engines._local.blackbox import BlackBox
from nbtrain.engines._local.kernel_channel import Channel
from nbtrain.engines._local.nursery import end_group
from nbtrain.engines._local.processes import Processes
from nbtrain.engines._local.warm import warm
from nbtrain.engines.base import Death, Frame, Share
from nbtrain.exchange.shared_memory import Segment
from nbtrain.worker.loop.shared_board import OwnedBoard
from nbtrain.worker.process.rank_config import ASK, RankConfig

if TYPE_CHECKING:
    from nbtrain.engines._local.fork import Body

GRACE = 2.0
"""Seconds in which ranks may end by themselves."""
ANSWER = 0.02
"""Seconds that a running process takes to write its stack."""
NEWS = 5.0
"""Seconds in which the death of a process whose connection has ended is reported; the nursery may be importing."""
LOOK_UP = 0.1
"""Seconds between looks at processes that nobody reports on."""
_generations = 0


class LocalPool:
    """A nursery's forks, fresh interpreters or forks of the kernel, behind one channel."""

    def __init__(
        self, spec: PoolSpec, body: Body | None = None, share: Share | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`share`: of a pool on several machines, this one's. `environ`: variables that its ranks get besides this
        process's."""
        global _generations
        _generations += 1
        self.spec = spec
        if spec.start == "fork" and (why := fork_safety.why_not_fork()) is not None:
            raise UsageError(why)
        self._share = share
        self.environ = dict(environ)
        self.ranks = share.ranks if share is not None else _ranks(spec)
        self._closed = False
        self._ready: set[int] = set()
        self._said: dict[int, str] = {}
        """rank → why it cannot start, or ""; a rank that is missing has sent nothing yet"""
        self._heard: list[Event | Death] = []
        """events that came while ranks were replaced"""
        self._generation = _generations
        self._groups_formed = 0
        self._stores: list[Segment] = []
        self._boxes: dict[int, BlackBox] = {}
        with contextlib.ExitStack() as undo:
            self.directory = directory.make()
            undo.callback(directory.remove, self.directory)
            self._channel = Channel(self.directory, self._numbers)
            undo.callback(self._channel.close)
            self.board = OwnedBoard(spec.world_size, self.directory)
            undo.callback(self.board.close)
            self._processes: Processes = _processes(spec.start, body)
            undo.callback(self._processes.release)
            if (fd := self._processes.fileno()) is not None:
                self._channel.watch(fd)
            for number in range(2):
                self._stores.append(Segment(number, 0, self.directory))
                undo.callback(self._stores[-1].close)
            for rank in self._numbers:
                self._boxes[rank] = BlackBox(rank, self.directory)
                undo.callback(self._boxes[rank].close)
            self._launch(self.ranks, share.store if share is not None else self._new_store(), spec.early)
            undo.pop_all()

    @property
    def _numbers(self) -> list[int]:
        return [info.rank for info in self.ranks]

    def _launch(self, ranks: Iterable[RankInfo], store: str, early: bool = False) -> None:
        # Of now: what a notebook has set since counts for one that is replaced.
        environ = {**os.environ, **self.environ}
        share = self._share
        if self.spec.kind == "tpu" and self.spec.uuids:
            environ["TPU_VISIBLE_CHIPS"] = self.spec.uuids[0]
        self._processes.launch(
            RankConfig(
                info=info, directory=self.directory, secret=self._channel.secrets[info.rank], backend=self.spec.backend,
                generation=self._generation, store=store, board=self.board.path, early=early,
                texts=self._boxes[info.rank].paths, stack=self._boxes[info.rank].stack,
                last_place=self._boxes[info.rank].last_place, environ=environ,
                shares_cards=self.spec.shares_cards,
                address=share.address if share is not None else "", master=share.master if share is not None else "",
            )
            for info in ranks
        )  # fmt: skip

    def _new_store(self) -> str:
        """An empty file for a process group's store. It is in memory, since disks may be full; two are used in turn:
        a rank that leaves a group late still writes to its file, and waits for it if it is gone."""
        self._groups_formed += 1
        store = self._stores[self._groups_formed % len(self._stores)]
        os.ftruncate(store.fd, 0)
        return store.path

    def wake(self) -> None:
        self._channel.wake()

    def regroup(self, anew: Iterable[int], store: str = "") -> None:
        """Ranks `anew` are replaced by new processes, and all form a new group. Does not wait for them. `store`: where
        it meets, if other machines take part."""
        gone = set(anew)
        if alive := gone & set(self._processes.pids()):
            self._processes.kill(alive)
            patience = AwakeTimeout(GRACE)
            while alive & set(self._processes.pids()) and not patience.over:
                # Events of the other ranks are kept, those of the replaced ones are not.
                self._heard += [event for event in self._hear(0.005) if event.rank not in gone]
        for rank in gone:
            self._channel.expect(rank)
            self._ready.discard(rank)
            self._said.pop(rank, None)
            self._boxes[rank].empty(self.board)
        store = store or self._new_store()
        if gone:
            self._launch([info for info in self.ranks if info.rank in gone], store)
        if self.spec.world_size > 1:
            self.send(Regroup(store=store), [info.rank for info in self.ranks if info.rank not in gone])
            self._ready.clear()

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        self._channel.send(message, ranks)

    def poll(self, seconds: float) -> list[Event | Death]:
        if not self._heard:
            return self._hear(seconds)
        before, self._heard = self._heard, []
        return before + self._hear(0)

    def _hear(self, seconds: float) -> list[Event | Death]:
        if self._processes.fileno() is None:
            seconds = min(seconds, LOOK_UP)
        heard: list[Event | Death] = list(self._channel.receive(seconds))
        deaths = self._processes.news()
        if self._channel.ended:  # a cell that began before the news came would be sent to a rank that is gone
            patience = AwakeTimeout(NEWS)
            while self._channel.ended & set(self._processes.pids()) and not patience.over:
                heard += self._channel.receive(0.005)
                self._processes.attend()
                deaths += self._processes.news()
            self._channel.ended.clear()
        if deaths:
            heard += self._channel.receive(0.05)  # what they said before they died
        for event in heard:
            self._note(event)
        if not deaths:
            return heard
        words = {death.rank: self._boxes[death.rank].last_words(self.board) for death in deaths}
        heard += [output for rank in words for output in words[rank]]
        return heard + [
            replace(
                death,
                said=self._said.get(death.rank) or death.said or self._last_line(death, words[death.rank]),
                frames=tuple(self._boxes[death.rank].crash()),
                last_seen=tuple(self._boxes[death.rank].last_seen()),
            )
            for death in deaths
        ]

    def _last_line(self, death: Death, words: Iterable[Output]) -> str:
        """Of an error that a rank could not report: it had not come far enough."""
        if death.rank in self._ready or death.code != 1:
            return ""
        lines = [line for output in words if output.stream == "stderr" for line in output.text.splitlines()]
        return next((line for line in reversed(lines) if line.strip()), "")

    def _note(self, event: Event | Death) -> None:
        if isinstance(event, RankState) and event.state == "ready":
            self._ready.add(event.rank)
        if isinstance(event, Output):  # the traceback, which is printed too
            return
        why = f"{event.name}: {event.text}" if isinstance(event, Failed) and event.rank not in self._ready else ""
        self._said[event.rank] = why

    def interrupt(self, ranks: Iterable[int]) -> None:
        pids = self.pids()
        for rank in ranks:
            if rank in pids and rank in self._said:  # before that it has no handler, and would end
                _signal(pids[rank], signal.SIGINT)

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[Frame]]:
        pids = self.pids()
        asked = {rank: self._boxes[rank].mark() for rank in ranks if rank in self._ready & set(pids)}
        for rank in asked:
            _signal(pids[rank], ASK)
        time.sleep(ANSWER)
        return {rank: self._boxes[rank].frames(since) for rank, since in asked.items()}

    def pids(self) -> dict[int, int]:
        return self._processes.pids()

    def spare(self) -> int:
        return 0

    def place(self, rank: int) -> str:
        pid = self.pids().get(rank)
        return f"process {pid}" if pid is not None else ""

    def alive(self) -> set[int]:
        return set(self._processes.pids())

    def watch(self, fd: int) -> None:
        """Have `poll` return for this descriptor too."""
        self._channel.watch(fd)

    def kill(self, ranks: Collection[int] | None = None) -> None:
        for rank, pid in self.pids().items():
            if ranks is None or rank in ranks:
                end_group(pid)

    def close(self, *, kill: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._end(kill)
        finally:
            self._channel.close()
            self.board.close()
            for store in self._stores:
                store.close()
            for box in self._boxes.values():
                box.close()
            directory.remove(self.directory)

    def _end(self, kill: bool) -> None:
        processes, ranks = self._processes, self._numbers
        try:
            if not kill:
                with contextlib.suppress(PoolError):  # they take no message: they are killed
                    self._channel.send(Close(), ranks)
                    self._wait()
            if not processes.settled:
                processes.kill(ranks)
                self._wait()
        except PoolError:
            pass  # the nursery is gone, and every rank with it
        finally:
            if (fd := processes.fileno()) is not None and fd >= 0:
                self._channel.unwatch(fd)
            processes.release()

    def _wait(self) -> None:
        """Wait until no process is left, `GRACE` at most. This includes a rank that is just being forked."""
        patience = AwakeTimeout(GRACE)
        while not self._processes.settled and not patience.over:
            self._channel.receive(0.01)
            self._processes.news()


def _ranks(spec: PoolSpec) -> tuple[RankInfo, ...]:
    threads = devices.threads_per_rank(spec.world_size, host.cores_allowed())
    in_node = spec.world_size // spec.nodes
    return tuple(
        RankInfo(
            rank=rank, world_size=spec.world_size, local_rank=rank % in_node, device=device, threads=threads,
            devices=spec.devices if spec.together else (), nodes=spec.nodes,
        )
        for rank, device in enumerate(spec.devices[: spec.world_size])
    )  # fmt: skip


def _processes(start: str, body: Body | None) -> Processes:
    if start == "warm":
        return warm()
    if start == "spawn":
        from nbtrain.engines._local.spawn import Spawn

        return Spawn()
    from nbtrain.engines._local.fork import Fork

    assert body is not None, "a fork needs to be told what to do"
    return Fork(body)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
