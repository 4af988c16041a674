"""What the server's page, and buttons while the kernel is busy, see of this notebook's ranks and may do with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import nbtrain.machine.host as host
from nbtrain.notebook.pool.pool_manager import PoolManager
from nbtrain.notebook.run.cell_run import CellRun
from nbtrain.notebook.run.run_state import OVER, Answer, RunControls
from nbtrain.watch.beacon import Beacon
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.runs.run_folder import notebook

IDLE = "no cell runs on the ranks"


class PublicRecord:
    """What others see of one session. `about` and `do` are called from the beacon's threads."""

    def __init__(self, namespace: dict[str, Any], ranks: PoolManager) -> None:
        self._namespace = namespace
        self._ranks = ranks
        self._run: dict[str, Any] | None = None
        """what does not change about the last run"""
        self._controls: RunControls | None = None
        """of the run that goes on"""
        self._beacon: Beacon | None = None
        self.make_beacon: Callable[[Callable[[], dict[str, Any]], Callable[..., Answer]], Beacon | None] = Beacon.start
        """where this process is no kernel, it may be found otherwise"""
        self.feed: Feed | None = None
        """of the last run"""

    @property
    def kernel(self) -> str:
        """The kernel's id; empty where no server could find it."""
        return self._beacon.kernel_id if self._beacon is not None else ""

    def open(self) -> None:
        """Ranks are there, or about to start."""
        if self._beacon is None:
            self._beacon = self.make_beacon(self.about, self.do)
        self.changed()

    def follow(self, run: CellRun) -> None:
        self.feed, self._controls = run.observers.feed, run.controls
        self._run = self.feed.run
        if self._beacon is not None:
            self._beacon.follow(run.observers.feed)
        self.changed()

    def changed(self) -> None:
        """Ranks started or ended, or a run did."""
        if self._beacon is not None:
            self._beacon.changed()

    def close(self) -> None:
        beacon, self._beacon = self._beacon, None
        if beacon is not None:
            beacon.close()

    def about(self) -> dict[str, Any]:
        pool = self._ranks.pool
        rows = []
        if pool is not None:
            pids = pool.pids()
            for info in pool.ranks:
                pid = pids.get(info.rank)
                memory = None if pid is None else host.private_memory(pid)
                rows.append({"rank": info.rank, "pid": pid, "device": info.device, "memory": memory})
        ready = self._ranks.everybody_ready
        return {
            "kernel": self.kernel,
            "pid": os.getpid(),
            "notebook": notebook(self._namespace),
            "engine": pool.spec.engine if pool is not None else "",
            "ranks": rows,
            "state": "running" if self._computes else "idle" if ready else "starting",
            "run": self._run,
        }

    @property
    def _computes(self) -> bool:
        """Whether a run has the ranks; one whose work waits for the notebook has them no more."""
        return self._ranks.running and not (self._controls is not None and self._controls.over)

    def do(self, command: str, run: str | None = None) -> Answer:
        """`run`: the id of the run that is meant. A page that is older than the kernel must not end what runs now."""
        if run is not None and (self._run is None or self._run["id"] != run):
            return False, OVER
        if self._controls is not None and self._ranks.running:
            return self._controls.do(command)
        if run is not None:  # it has ended just now, and the ranks are not its any more
            return False, OVER
        pool = self._ranks.pool
        if command == "stacks" and pool is not None:
            return True, "\n".join(self._ranks.where())
        if command == "kill" and pool is not None:
            pool.kill()
            return True, "the ranks are ended; the next distributed cell starts new ones"
        return False, IDLE
