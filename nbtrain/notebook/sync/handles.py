"""Handles for objects that live on the ranks only: fetches copies when they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.base.events import Event, Pulled
from nbtrain.base.messages import Message, Pull, Serve
from nbtrain.exchange.kinds.base import GONE, Handle, Node
from nbtrain.notebook.sync.kept_handles import live_handles
from nbtrain.notebook.sync.notebook_side import NotebookSide

SLOW = 2.0
"""Seconds after which whatever takes long besides the cell itself says what it is doing."""


class Fetch:
    """Asks the ranks of one pool for copies."""

    def __init__(
        self, side: NotebookSide, send: Callable[[Message, Iterable[int]], None],
        listen: Callable[[Iterable[int]], list[Event]], dead: Callable[[], set[int]], together: Callable[[], bool],
        busy: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`listen` raises when one of these ranks is gone. `dead`: ranks that died since the last cell. `together`:
        whether a rank may have only a piece of an object. `busy`: whether a run in the background talks to the
        ranks."""
        self.notebook_side = side
        self.ranks = side.readers
        self.send = send
        self.listen = listen
        self.dead = dead
        self.together = together
        self.busy = busy
        self.leads: dict[int, int] = {}
        """handle → the rank that ran the cell which left the object behind"""
        self._asked = self._expected = 0
        self._open = True
        self._thread = threading.get_ident()

    def attach(self, nodes: Iterable[Node], lead: int) -> None:
        """Let these handles be pulled from now on; `lead` ran the cell that left the objects behind."""
        for node in nodes:
            if type(node.obj) is Handle and node.obj.fetch is None:
                node.obj.fetch = self._way(node.key, self.leads.setdefault(node.key, lead), node.obj.lost)

    def replaced(self, ranks: Iterable[int]) -> None:
        """New processes take these ranks' places: what the others have can still be pulled."""
        for node in live_handles(self.notebook_side.table):
            node.obj.lost.update(ranks)
            if node.obj.lost >= set(self.ranks):
                node.obj.fetch, node.obj.holds = None, []

    def inherit(self, before: Fetch) -> None:
        """Take over handles whose objects the ranks have kept."""
        self.leads = before.leads
        self.attach([node for node in self.notebook_side.table.nodes.values() if node.key in self.leads], 0)

    def close(self) -> None:
        self._open = False
        for node in live_handles(self.notebook_side.table):
            node.obj.fetch, node.obj.holds = None, []

    def _way(self, key: int, lead: int, lost: set[int]) -> Callable[[bool], dict[int, Any]]:
        def fetch(everybody: bool) -> dict[int, Any]:
            self._check()
            gone = lost | self.dead()
            have = tuple(rank for rank in self.ranks if rank not in gone)
            if not have:
                raise CannotTravel(GONE)
            return self._fetch(key, have if everybody else (lead,) if lead in have else have[:1])

        return fetch

    def _check(self) -> None:
        if not self._open:  # other ranks may have something else under this key
            raise CannotTravel(GONE)
        if self.busy():
            raise CannotTravel("a run in the background has the ranks; wait for it, or stop it: nbtrain.background()")
        if threading.get_ident() != self._thread:  # two readers would take each other's answers
            raise CannotTravel("bring it home in a cell of its own: threads cannot talk to the ranks")

    def _fetch(self, key: int, ranks: tuple[int, ...]) -> dict[int, Any]:
        answers: dict[int, Pulled] = {}
        try:
            return self._opened(self._answers(key, ranks, answers), ranks)
        except BaseException:  # a press on Stop: what comes too late must not take up memory
            self._expected = 0
            for answer in answers.values():
                self.missed(answer)
            raise

    def missed(self, answer: Pulled) -> None:
        """Give an answer that nobody waits for (any more) back, so that its rank can free the memory."""
        if answer.asked != self._expected and answer.parcel is not None:
            self.notebook_side.refuse(answer.rank, answer.parcel)

    def _answers(self, key: int, ranks: tuple[int, ...], answers: dict[int, Pulled]) -> dict[int, Pulled]:
        self._asked += 1
        asked, began, said = self._asked, time.monotonic(), False
        self._expected = asked
        released = {rank: self.notebook_side.released(rank) for rank in ranks}
        together = self.together()
        pull = Pull(key=key, asked=asked, drop=self.notebook_side.forgotten, released=released, together=together)
        for rank in ranks:
            self.send(pull, [rank])
            if together:
                self.send(Serve(lead=rank), [other for other in self.ranks if other != rank])
        while len(answers) < len(ranks):
            for event in self.listen(ranks):
                if isinstance(event, Pulled) and event.asked == asked:
                    answers[event.rank] = event
            if not said and time.monotonic() - began > SLOW:
                said = True
                print("bringing it home …")
        return answers

    def _opened(self, answers: dict[int, Pulled], ranks: tuple[int, ...]) -> dict[int, Any]:
        values = {
            rank: self.notebook_side.open_alone(rank, answer.parcel, "it")
            for rank, answer in sorted(answers.items())
            if answer.parcel is not None
        }
        if not values:
            reason = answers[ranks[0]].reason
            raise CannotTravel(
                f"it cannot leave the ranks: {reason}. Take what you need of it in a %%distributed cell, "
                "under a name of its own"
            )
        return values
