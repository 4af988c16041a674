"""The interface of a pool: ranks that outlive cells."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from nbtrain.base.events import Event
from nbtrain.base.messages import Message
from nbtrain.base.specs import PoolSpec, RankInfo
from nbtrain.worker.loop.shared_board import OwnedBoard


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A rank's process ended."""

    rank: int
    pid: int
    signal: int | None
    code: int | None
    said: str = ""
    """what it printed, if it could not start"""
    peak: int = 0
    """bytes of memory that it had at most"""
    limit: int | None = None
    """bytes that may be used on its machine, if that is another"""
    frames: tuple[Frame, ...] = ()
    """where it crashed, the innermost call first"""
    last_seen: tuple[Frame, ...] = ()
    """where the cell was a moment before it died; a signal that kills at once leaves no more"""
    machine: str = ""
    """the machine that was lost with it; empty: its process ended"""

    def __str__(self) -> str:
        if self.machine:
            return f"rank {self.rank} is lost with the machine {self.machine}: {self.said}"
        if self.signal is not None:
            return f"rank {self.rank} (process {self.pid}) was ended by {_name(self.signal)}"
        if not self.pid and self.said:
            return f"rank {self.rank} could not be started: {self.said}"
        said = f"; it said:\n{self.said}" if self.said else ""
        return f"rank {self.rank} (process {self.pid}) ended by itself with exit code {self.code}{said}"


def _name(number: int) -> str:
    """Of a signal; those for real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one machine of several has of a pool, and how its ranks reach the others'."""

    ranks: tuple[RankInfo, ...]
    store: str
    """where the process group meets"""
    address: str
    """this machine's, for the others"""
    master: str
    """of rank 0's machine"""


class Pool(Protocol):
    """Ranks that run or are starting. But for `wake` and `kill`, all calls come from the kernel's main thread."""

    spec: PoolSpec
    directory: str
    """private to the user, gone with the pool"""
    ranks: tuple[RankInfo, ...]
    board: OwnedBoard
    """memory that all ranks and this process see"""

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        """Does not wait: a rank that is still starting reads it later."""

    def poll(self, seconds: float) -> list[Event | Death]:
        """What has happened, in order; waits up to so many seconds for the first."""

    def wake(self) -> None:
        """Have `poll` return. May be called by a signal handler, and by any thread."""

    def regroup(self, anew: Iterable[int]) -> None:
        """These ranks get new processes, the others live on; all of them form a new process group. Does not wait."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in the cell these ranks run."""

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[Frame]]:
        """Stacks of their main threads, innermost call first; none of a stopped process."""

    def alive(self) -> set[int]:
        """Ranks that have a process, as far as `poll` has told."""

    def pids(self) -> dict[int, int]:
        """rank → process, of those that live on this machine."""

    def spare(self) -> int:
        """Machines that could have ranks, and have none."""

    def place(self, rank: int) -> str:
        """`process 17`, `process 17 on node-b`; empty: it has none."""

    def kill(self, ranks: Collection[int] | None = None) -> None:
        """End these processes, or all, at once; `poll` tells of it. May be called by any thread."""

    def close(self, *, kill: bool = False) -> None:
        """End every rank and leave nothing behind. `kill`: without asking them."""
