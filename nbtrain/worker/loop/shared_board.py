"""Memory that the kernel and all ranks of a pool share: which collectives each rank has entered, and where to stop.

The kernel makes it and writes its head; each rank writes a part of its own and reads all. No messages are needed: the
position of a rank whose interpreter is busy can still be read, and an aligned word is written in one piece.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from nbtrain.exchange.shared_memory import Segment

HEAD = 8
"""words that the kernel writes, before the ranks' parts"""
STOP, TARGET, ABORT, WEIGHTS, WEIGHTS_AT, LOCALS = range(6)
"""In the head:
STOP, TARGET          the run that is to stop, and after which step (UNKNOWN as long as that is not settled)
ABORT                 the run whose collectives are to be given up
WEIGHTS, WEIGHTS_AT   the notebook's last request for live weights, and after which step they are saved for it
LOCALS                the notebook's last request for the locals of all ranks
"""
UNKNOWN = -1
VISIBLE = 0.004
"""Seconds after which a word that was written is seen by every rank of this machine."""
REQUESTS = 1 << 32
"""per run: the first of run 3 is 3 * REQUESTS + 1, so that it can be made before a rank has begun the run"""

CELL, COUNT, STEPS, WAITING, OPEN, ENTERED, RAISED, FORMING, TAKEN = range(9)
"""In a rank's part:
CELL, COUNT   the run that it has ended, after how many collectives
STEPS         how many steps have ended in the present run
WAITING       since when it waits in a collective (the monotonic clock's nanoseconds); 0: it does not
OPEN          the run it is in; less than zero once it has come to the cell's end
ENTERED       how many collectives it has entered in that run
RAISED        the run in which it was told to end, which is done once: user code may have something to put in order
FORMING       how many process groups its code has begun to form (run << 32, plus their number)
TAKEN         and the next: how many bytes of its file descriptors 1 and 2 it has taken up
"""
MARKS = 10
"""words for these, before what the rank has entered"""
PLACES = 128
"""collectives kept for each rank; no rank gets that far ahead of another"""
WIDTH = 10
"""words of each"""
FILES = 32
"""files that rank 0 wrote, by a hash"""
PART = MARKS + PLACES * WIDTH + 2 * FILES

WATCHED = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
    "all_gather_single", "reduce_scatter_single",
)  # fmt: skip
"""Not every torch has all of them: the last two are what newer ones call `..._tensor`, and what `fully_shard` uses."""
BACKWARD, STEP = 1, 2
"""what a collective belongs to: a backward, or a step under a strategy that communicates there"""


def size(world_size: int) -> int:
    return 8 * (HEAD + world_size * PART)


class Board:
    """The board as one process sees it."""

    def __init__(self, memory: mmap.mmap, world_size: int) -> None:
        self.memory = memory
        words = memoryview(memory).cast("q")
        self.head = words[:HEAD]
        self.parts = [words[HEAD + i * PART : HEAD + (i + 1) * PART] for i in range(world_size)]

    @classmethod
    def open(cls, path: str, world_size: int) -> Board:
        """Open the kernel's board on a rank."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), size(world_size)), world_size)

    def waits(self, rank: int, run: int) -> tuple[int, str] | None:
        """Since when this rank waits for others in this run, and what for, in words."""
        wait = self.waits_in(rank, run)
        return None if wait is None else (wait[0], words(wait[1]))

    def waits_in(self, rank: int, run: int) -> tuple[int, list[int]] | None:
        """`waits`, with the words of the rank's part."""
        part = self.parts[rank]
        since = part[WAITING]
        if not since or part[OPEN] != run:
            return None
        at = MARKS + part[ENTERED] % PLACES * WIDTH
        return since, part[at : at + WIDTH].tolist()

    @staticmethod
    def at(rank: int) -> int:
        """The byte at which a rank's part begins."""
        return 8 * (HEAD + rank * PART)


class OwnedBoard(Board):
    """The board in the kernel, which makes and removes it."""

    def __init__(self, world_size: int, directory: str) -> None:
        self._segment = Segment(0, size(world_size), directory)
        self.path = self._segment.path
        super().__init__(mmap.mmap(self._segment.fd, size(world_size)), world_size)

    def settle(self) -> None:
        """Return once every rank can see what was written in the head, and the ranks' parts are as they were then or
        later: who has ended a step by now has said so, and who ends one from here on looks first."""
        time.sleep(VISIBLE)

    def close(self) -> None:
        for view in (self.head, *self.parts):
            view.release()
        self.memory.close()  # it has a descriptor of its own
        self._segment.close()


def collective(place: Sequence[int]) -> str:
    """The collective that a rank has entered, in words."""
    return f"in {WATCHED[place[1]]}" + (f" of {place[2]:,}" if place[2] else "")


def words(place: Sequence[int]) -> str:
    """The collective that a rank has entered, and where in its loop."""
    _, _, _, where, steps, batch, batches, *_ = place
    calls = {BACKWARD: "in backward()", STEP: "in optimizer.step()"}
    what = calls.get(where) or collective(place)
    at = f" at batch {batch}" + (f" of {batches}" if batches else "") if batch else ""
    return f"{what}{at} after {steps} step{'s' * (steps != 1)}"
