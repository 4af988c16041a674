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
from nbtrain.engines._local.processes import Children
from nbtrain.engines._local.warm import environment, in_notebook
from nbtrain.engines.base import Death
from nbtrain.worker.process.rank_config import RankConfig

LONGEST = 2000
"""Bytes of the ranks' output that are quoted."""


class Spawn(Children):
    """Ranks as children of the kernel. A pipe that only the kernel holds open tells them when it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._errors = directory.unnamed()
        self._theirs, self._ours = os.pipe()
        self._hashes = str(random.SystemRandom().randrange(1, 1 << 32))

    def launch(self, configs: Iterable[RankConfig]) -> None:
        for config in configs:
            process = subprocess.Popen(
                [sys.executable, "-m", "nbtrain.worker", str(self._theirs), config.directory, in_notebook()],
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
            process.returncode = 0  # for `subprocess` it is over: `news` waits for the process
            self._pids[config.info.rank] = process.pid

    def news(self) -> list[Death]:
        return [dead if dead.code == 0 else replace(dead, said=self._said()) for dead in super().news()]

    def _said(self) -> str:
        """What the processes wrote before they had a channel."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), LONGEST, max(0, size - LONGEST)).decode("utf-8", "replace").strip()

    def release(self) -> None:
        super().release()
        os.close(self._theirs)
        os.close(self._ours)
        self._errors.close()
