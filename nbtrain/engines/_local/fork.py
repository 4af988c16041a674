"""`--start fork`: the kernel itself is forked for one cell, so that nothing needs pickling on the way out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable

from nbtrain.engines._local import directory
from nbtrain.engines._local.nursery import end_group
from nbtrain.engines._local.processes import Children
from nbtrain.worker.process.rank_config import RankConfig, print_error

Body = Callable[[RankConfig], None]


class Fork(Children):
    """Ranks as forks of the kernel. `body` is what each of them does; it knows the notebook's namespace."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._body = body
        self._watcher = 0
        self._lifeline = -1

    def launch(self, configs: Iterable[RankConfig]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        ends, self._lifeline = os.pipe()
        path = ""
        for config in configs:
            path = config.directory
            pid = os.fork()
            if pid == 0:
                os.close(self._lifeline)
                self._live(config)
            self._pids[config.info.rank] = pid
        self._watcher = os.fork()
        if self._watcher == 0:
            self._watch(ends, path)
        os.close(ends)

    def _watch(self, ends: int, path: str) -> None:
        """In a process of its own: when the kernel is killed, end the ranks and all that they started."""
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._lifeline)
            os.read(ends, 1)  # nothing is ever written: this ends when the kernel does
            for pid in self._pids.values():
                end_group(pid)
            directory.remove(path)
        finally:
            os._exit(0)

    def _live(self, config: RankConfig) -> None:
        code = 1
        try:
            from nbtrain.worker.process.rank_config import dies_with_its_parent

            dies_with_its_parent()
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._body(config)
            code = 0
        finally:
            if code:
                print_error()
            os._exit(code)

    def release(self) -> None:
        super().release()
        if self._watcher:
            os.kill(self._watcher, signal.SIGKILL)
            os.waitpid(self._watcher, 0)
            os.close(self._lifeline)
            self._watcher = 0
