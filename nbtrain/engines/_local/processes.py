"""What the three ways to start local ranks have in common: an interface, and ranks that are children of the kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from nbtrain.engines._local.nursery import end_group
from nbtrain.engines.base import Death

if TYPE_CHECKING:
    from nbtrain.worker.process.rank_config import RankConfig


class Processes(Protocol):
    """The processes of one pool."""

    @property
    def settled(self) -> bool:
        """No process is alive or about to start."""

    def fileno(self) -> int | None:
        """A descriptor that is readable when there is news; None if `news` must be polled."""

    def launch(self, configs: Iterable[RankConfig]) -> None:
        """Does not wait for them."""

    def news(self) -> list[Death]:
        """Ranks that died since the last call. Does not wait."""

    def attend(self) -> None:
        """While news are waited for: see to it that somebody tells them. May raise `PoolError`."""

    def pids(self) -> dict[int, int]:
        """rank → process, of those that are alive."""

    def kill(self, ranks: Iterable[int]) -> None:
        """End these, with whatever they have started."""

    def release(self) -> None:
        """End every process of the pool."""


class Children:
    """Ranks that are children of the kernel: all of `Processes` but `launch`."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    @property
    def settled(self) -> bool:
        return not self._pids

    def fileno(self) -> None:
        return None

    def news(self) -> list[Death]:
        deaths = []
        for rank, pid in list(self._pids.items()):
            try:
                done, status, usage = os.wait4(pid, os.WNOHANG)
                peak = usage.ru_maxrss
            except ChildProcessError:  # the notebook ignores SIGCHLD, or waits for children itself
                done, status, peak = pid, 0, 0
            if done:
                del self._pids[rank]
                end_group(pid)
                deaths.append(death(rank, pid, status, peak))
        return deaths

    def attend(self) -> None:
        pass  # the system does

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._pids:
                end_group(self._pids[rank])

    def release(self) -> None:
        for pid in self._pids.values():
            end_group(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids.clear()


def death(rank: int, pid: int, status: int, peak: int) -> Death:
    """`status` and `peak` are the system's: memory in bytes on macOS, elsewhere in KiB."""
    peak *= 1 if sys.platform == "darwin" else 1024
    if os.WIFSIGNALED(status):
        return Death(rank=rank, pid=pid, signal=os.WTERMSIG(status), code=None, peak=peak)
    return Death(rank=rank, pid=pid, signal=None, code=os.WEXITSTATUS(status), peak=peak)
