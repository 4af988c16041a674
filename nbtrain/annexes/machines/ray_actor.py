"""What runs in an actor of Ray's: a node of nbtrain, as a process of its own. Only names of the standard library and
of Ray here, and what needs no more than those, as each of Ray's machines imports this file first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque

import ray

from nbtrain.engines.remote.notebook_environ import lies_in, set_in_notebook

TAIL = 20
"""Lines that are kept of what the node says."""
MOMENT = 1.0
"""Seconds after the node's end in which its last words arrive; a rank's own children may keep the pipe open."""
OF_RAY = "OMP_NUM_THREADS", "PYTHONBREAKPOINT"
"""What Ray sets for its own workers: ranks have threads and breakpoints of their own."""


class NodeActor:
    """One machine's node."""

    def run(self, ticket: str) -> tuple[int, str]:
        """Returns when it has ended: its exit status, and the last lines that it said."""
        process = subprocess.Popen(
            [sys.executable, "-m", "nbtrain.annexes.machines.watched_node"], env=_environment(), start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        said: deque[str] = deque(maxlen=TAIL)
        listener = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
        listener.start()
        process.stdin.write(ticket + "\n")
        process.stdin.flush()  # and it stays open: the node ends when this process does, however that is
        status = process.wait()
        listener.join(MOMENT)
        return status, "".join(said)


def _environment() -> dict[str, str]:
    """This worker's, with what it finds its packages by: a runtime environment may have put it on `sys.path` only."""
    by_ray = set_in_notebook()
    environment = {name: value for name, value in os.environ.items() if name not in OF_RAY or name not in by_ray}
    ours = [os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix, os.path.dirname(ray.__file__))]
    path = dict.fromkeys(folder for folder in sys.path if folder and not lies_in(folder, ours))
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}
