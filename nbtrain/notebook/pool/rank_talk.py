"""Sends the ranks of one notebook messages, hears what they say, and knows which of them are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import nbtrain.machine.host as host
from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import PoolError
from nbtrain.base.events import Adopted, Event, Pulled, RankLocals, RankState
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.base.messages import Adopt, Message
from nbtrain.compat import kernel
from nbtrain.engines.base import Death, Pool
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.notebook.report.stacks import locals_lines, where
from nbtrain.notebook.sync.handles import SLOW, Fetch
from nbtrain.notebook.sync.notebook_side import NotebookSide
from nbtrain.worker.loop.shared_board import LOCALS

BEAT = 0.05
"""Seconds to wait for an event before the clock is looked at again."""
MOMENT = 0.3
"""Seconds that a new process group may take to form."""
ANSWER = 2.0
"""Seconds in which a rank whose interpreter is not busy tells its locals."""
LONG = 10.0
"""Seconds after which an idle rank that has not answered is taken for stuck; answers take milliseconds."""


def starting(count: int) -> str:
    return f"starting {count} rank{'s' * (count > 1)} …"


class RankTalk:
    """But for `wake`, all calls come from the kernel's main thread."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self.notebook_side: NotebookSide | None = None
        self.fetch: Fetch | None = None
        self.deaths: list[Death] = []
        """ranks that died, of which the user has not been told"""
        self.running = False
        self._runs = 0
        self._killed = self._killed_anywhere = 0
        """how many processes the system had ended for lack of memory when the ranks were started"""
        self._adopting: set[int] = set()
        self._ready: set[int] = set()
        self._locals: dict[int, RankLocals] = {}
        """the last that each rank has told"""

    def lose(self) -> None:
        """End a pool that cannot go on: some rank died or is stuck."""
        raise NotImplementedError

    def next_run(self) -> int:
        """A number that no run of this notebook has had."""
        self._runs += 1
        return self._runs

    # -- messages and events -------------------------------------------------------------

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        if self.pool is not None:
            self.pool.send(message, ranks)

    def listen(self, seconds: float) -> list[Event]:
        """The events of the ranks; deaths and answers to an adoption are handled here."""
        with shielded():  # an event that was received is not sent again
            try:
                heard = [] if self.pool is None else self.pool.poll(seconds)
            except PoolError:
                self.lose()
                raise
            return [left for event in heard if (left := self._note(event)) is not None]

    def _note(self, event: Event | Death) -> Event | None:
        """The event if there is something left to do for the caller."""
        if isinstance(event, Death):
            self.deaths.append(event)
            return None
        if isinstance(event, Adopted):
            self._adopting.discard(event.rank)
            if self.notebook_side is not None:
                self.notebook_side.lacks(event.lacking)
            return None
        if isinstance(event, Pulled) and self.fetch is not None:
            self.fetch.missed(event)
        if isinstance(event, RankLocals):
            self._locals[event.rank] = event
            return None
        if isinstance(event, RankState) and event.state == "ready":
            self._ready.add(event.rank)
        return event

    def wake(self) -> None:
        """Have `listen` return. May be called by a signal handler, and by any thread."""
        if (pool := self.pool) is not None:
            pool.wake()

    def answers(self, asked: Iterable[int] | None = None) -> list[Event]:
        """Events while ranks are asked something between two cells; raises if one of these, or any, has died."""
        events = [*self.settle(), *self.listen(BEAT)]
        dead = {death.rank for death in self.deaths}
        if self.pool is None or (dead if asked is None else dead.intersection(asked)):
            deaths = self.deaths
            self.lose()
            raise self.died(deaths)
        return events

    def adopt(self, home: HomeParcel, ranks: list[int]) -> None:
        """Tell the others to find their own of the objects that the lead made. They answer later."""
        if (home.news or home.holders) and ranks:
            self._adopting.update(ranks)
            self.send(Adopt(news=home.news, holders=home.holders), ranks)

    def _dead(self) -> set[int]:
        self.listen(0)
        return {death.rank for death in self.deaths}

    def settle(self) -> list[Event]:
        """Wait until every rank has answered the last adoption; returns the other events of that time."""
        events: list[Event] = []
        patience = AwakeTimeout(LONG)
        while self._adopting and not self.deaths:
            events += self.listen(BEAT)
            if patience.over:
                ranks = ", ".join(map(str, sorted(self._adopting)))
                self.lose()
                raise PoolError(f"rank {ranks} did not answer between two cells and was ended; run the cell again")
        return events

    # -- which ranks there are -----------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self.pool.pids().values()) if self.pool is not None else ()

    @property
    def out_of_memory_kills(self) -> bool:
        """Whether the system has ended a process for lack of memory since the ranks were started."""
        return (host.out_of_memory_kills() or 0) > self._killed

    @property
    def everybody_ready(self) -> bool:
        return self.pool is None or len(self._ready) == len(self.pool.ranks)

    def is_ready(self, rank: int) -> bool:
        return rank in self._ready

    def catch_up(self) -> None:
        """Receive what the ranks have sent, also those that are forming a new group at this moment."""
        self.listen(0)
        patience = AwakeTimeout(MOMENT)
        while not self.everybody_ready and not self.deaths and not patience.over:
            self.listen(BEAT)

    @property
    def gone(self) -> set[int]:
        """Ranks that died since the last cell, and those that wait for them to form a group with."""
        if self.pool is None or not self.deaths:
            return set()
        return {death.rank for death in self.deaths} | ({info.rank for info in self.pool.ranks} - self._ready)

    def wait_until_ready(self) -> None:
        if self.pool is None:
            return
        began: float | None = time.monotonic()
        while not self.everybody_ready and not self.deaths:
            if began is not None and time.monotonic() - began > SLOW:
                print(starting(len(self.pool.ranks)))
                began = None
            self.listen(BEAT)
        if self.deaths:
            deaths = self.deaths
            self.lose()
            raise self.died(deaths)

    def died(
        self,
        deaths: Iterable[Death],
        tails: Mapping[int, str] | None = None,
        handles_lost: str = "",
        less: Callable[[], str] | None = None,
    ) -> Exception:
        """The exception to raise for these deaths. `less` returns what needs less memory."""
        from nbtrain.notebook.report import exception_message

        killed: bool | None = self.out_of_memory_kills
        if not killed and (host.out_of_memory_kills(anywhere=True) or 0) > self._killed_anywhere:
            killed = None
        spec = self.pool.spec if self.pool is not None else None
        ranks = spec.world_size // (spec.nodes if spec.machines is not None else 1) if spec is not None else 1
        return exception_message.died(deaths, tails or {}, self.numbers(), killed, handles_lost, less, ranks)

    # -- what they do --------------------------------------------------------------------

    def where(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Where these ranks are, or all."""
        assert self.pool is not None
        asked = [info.rank for info in self.pool.ranks] if ranks is None else ranks
        return where(self.pool, asked, self._runs if self.running else -1, self.numbers())

    def locals(self) -> list[str]:
        """What the user's innermost calls hold on each rank. Asked while another thread listens to the ranks."""
        assert self.pool is not None
        if not self.running:
            return ["no cell runs, so there are no locals"]
        head = self.pool.board.head
        head[LOCALS] = asked = head[LOCALS] + 1
        patience = AwakeTimeout(ANSWER)
        ranks = [info.rank for info in self.pool.ranks]
        while not patience.over and any(self._told(rank, asked) is None for rank in ranks):
            time.sleep(0.01)
        return [line for rank in ranks for line in locals_lines(rank, self._told(rank, asked), self.numbers())]

    def _told(self, rank: int, asked: int) -> RankLocals | None:
        told = self._locals.get(rank)
        return told if told is not None and told.asked == asked else None

    def numbers(self) -> dict[str, int]:
        """File names of cells → their numbers; IPython 7 has none."""
        names = kernel.cell_names(self.shell)
        return {} if names is None else names
