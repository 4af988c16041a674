"""`--start spawn`: a fresh interpreter for each rank. Slow to start, and it works everywhere."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

from nbtrain.engines._local import directory
from nbtrain.engines._local.nursery import end_group
from nbtrain.engines._local.warm import death, environment
from nbtrain.engines.base import Death
from nbtrain.worker.process.start import RankConfig

LONGEST = 2000
"""Bytes of the ranks' output that are quoted."""


class Spawn:
    """Ranks as children of the kernel. A pipe that only the kernel holds open tells them when it is gone."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._errors = directory.unnamed()
        self._theirs, self._ours = os.pipe()
        self._hashes = str(random.SystemRandom().randrange(1, 1 << 32))

    @property
    def settled(self) -> bool:
        return not self._processes

    def fileno(self) -> None:
        return None

    def launch(self, configs: Iterable[RankConfig]) -> None:
        for config in configs:
            process = subprocess.Popen(
                [sys.executable, "-m", "nbtrain.worker", str(self._theirs), config.directory],
                pass_fds=(self._theirs,),
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
                # Sets of text come in the same order on all ranks, as they do where ranks are forks of one process.
                env={"PYTHONHASHSEED": self._hashes, **environment()},
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(config))
            process.stdin.close()
            self._processes[config.info.rank] = process

    def news(self) -> list[Death]:
        deaths = []
        for rank, process in list(self._processes.items()):
            try:
                done, status, usage = os.wait4(process.pid, os.WNOHANG)
                peak = usage.ru_maxrss
            except ChildProcessError:  # the notebook ignores SIGCHLD, or waits for children itself
                done, status, peak = process.pid, 0, 0
            if done:
                del self._processes[rank]
                process.returncode = os.waitstatus_to_exitcode(status)
                end_group(process.pid)
                dead = death(rank, process.pid, status, peak)
                deaths.append(replace(dead, said=self._said() if process.returncode else ""))
        return deaths

    def _said(self) -> str:
        """What the processes wrote before they had a channel."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), LONGEST, max(0, size - LONGEST)).decode("utf-8", "replace").strip()

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._processes:
                end_group(self._processes[rank].pid)

    def release(self) -> None:
        for process in self._processes.values():
            end_group(process.pid)
            process.wait()
        self._processes.clear()
        os.close(self._theirs)
        os.close(self._ours)
        self._errors.close()
