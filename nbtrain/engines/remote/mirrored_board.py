"""Keeps the pool's board alike on all machines: each has its own ranks' parts first hand, the others' a moment later.

Words of a part are sent where they have changed. Whoever reads a collective's entry believes it once its number is
right, so numbers are written last, as the rank itself does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from nbtrain.worker.loop.shared_board import MARKS, PART, PLACES, WAITING, WIDTH, Board, OwnedBoard

NUMBERS = np.zeros(PART, bool)
NUMBERS[MARKS : MARKS + PLACES * WIDTH : WIDTH] = True
"""the words that hold the number of an entry"""
ANSWER = 2.0
"""Seconds in which the machines answer that ranks can see the head."""
Words = Mapping[int, tuple[bytes, bytes]]


class MirroredBoard(OwnedBoard):
    """The kernel's board, of which each machine has a copy."""

    def __init__(
        self, world_size: int, directory: str, nodes: Callable[[], Iterable[int]], wake: Callable[[], None]
    ) -> None:
        """`nodes`: those that have ranks. `wake`: have them told."""
        super().__init__(world_size, directory)
        self._nodes, self._wake = nodes, wake
        self.asked = 0
        self._settled: dict[int, int] = {}
        """node → the last request that its ranks could see before it told where they are"""
        self._changed = threading.Condition()

    def settle(self) -> None:
        with self._changed:
            self.asked += 1
            self._wake()
            self._changed.wait_for(self._all_settled, ANSWER)

    def _all_settled(self) -> bool:
        return all(self._settled.get(node, 0) >= self.asked for node in self._nodes())

    def awaited(self, node: int) -> int:
        """The request that this node has yet to answer; 0: none."""
        return self.asked if self._settled.get(node, 0) < self.asked else 0

    def settled_on(self, node: int, asked: int) -> None:
        with self._changed:
            self._settled[node] = asked
            self._changed.notify_all()


class Outgoing:
    """What of these ranks' parts has not been sent."""

    def __init__(self, board: Board, ranks: Iterable[int], again: bool = False) -> None:
        """`again`: the other machines have words of ranks that had these numbers before, so that nothing is too."""
        self._parts = {rank: np.frombuffer(board.parts[rank], np.int64) for rank in ranks}
        self._sent = {} if again else {rank: part.copy() for rank, part in self._parts.items()}

    def changes(self) -> Words:
        changed = {}
        for rank, part in self._parts.items():
            now = part.copy()
            places = np.flatnonzero(now != self._sent[rank]) if rank in self._sent else np.arange(len(now))
            if len(places):
                self._sent[rank] = now
                changed[rank] = places.astype(np.uint16).tobytes(), now[places].tobytes()
        return changed


def write(board: Board, words: Words, clock: int = 0) -> None:
    """Write what came from another machine into this one's board. `clock`: nanoseconds that its monotonic clock is
    behind ours."""
    for rank, (at, values) in words.items():
        part = board.parts[rank]
        places, now = np.frombuffer(at, np.uint16), np.frombuffer(values, np.int64)
        order = np.argsort(NUMBERS[places], kind="stable")
        for place, value in zip(places[order].tolist(), now[order].tolist(), strict=True):
            part[place] = value + clock if place == WAITING and value else value


def everything(board: Board, ranks: Iterable[int]) -> Words:
    """All that these ranks have written, for a machine that comes later."""
    words = {}
    for rank in ranks:
        part = np.frombuffer(board.parts[rank], np.int64)
        places = np.flatnonzero(part).astype(np.uint16)
        words[rank] = places.tobytes(), part[places].tobytes()
    return words


def as_here(board: Board, places: Mapping[int, Iterable[bytes]]) -> Words:
    """What stands now at these places of each part, by this machine's clock."""
    words = {}
    for rank, those in places.items():
        at = np.unique(np.frombuffer(b"".join(those), np.uint16))
        words[rank] = at.tobytes(), np.frombuffer(board.parts[rank], np.int64)[at].tobytes()
    return words
