"""A rank in a fresh interpreter (`--start spawn`): its config comes on standard input."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
from contextlib import suppress

LOOK_UP = 0.5
"""Seconds between checks whether the kernel lives: a process that the notebook has forked holds the pipe too."""
BOTH = 0.5
"""Seconds after a rank's end in which its kernel may end of the same cause."""


def _guard(lifeline: int, directory: str) -> None:
    """Start a process that kills this rank, and all that it has started, when the kernel ends.

    A thread could not: it waits while modules are imported, and forever in a stopped rank.
    """
    rank, kernel = os.getpid(), os.getppid()
    ends, ours = os.pipe()
    if between := os.fork():
        os.close(ends)
        os.waitpid(between, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:  # no child of the rank's: the cell may wait for its own
            os.close(ours)
            _watch(lifeline, ends, rank, kernel, directory)
    finally:
        os._exit(0)


def _watch(lifeline: int, ends: int, rank: int, kernel: int, directory: str) -> None:
    """Nothing is written to these pipes: one becomes readable when the kernel ends, the other when the rank does."""
    while _lives(kernel):
        ready, _, _ = select.select([lifeline, ends], [], [], LOOK_UP)
        if lifeline in ready:
            break
        if ends in ready and not select.select([lifeline], [], [], BOTH)[0]:
            return
    with suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    lifeline, directory, in_notebook = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a notebook that ignores it hands that down
    _guard(lifeline, directory)
    os.close(lifeline)
    config = pickle.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    import torch  # noqa: F401  while what is wrong with it still goes where the kernel reads it

    from nbtrain.worker.process.rank_config import print_error
    from nbtrain.worker.rank import Rank
    from nbtrain.worker.shell.shell import make_shell

    try:
        Rank(config, make_shell(in_notebook=in_notebook)).serve()
    except BaseException:  # streams of ours would keep most of it
        print_error()
        os._exit(1)
    os._exit(0)  # a thread that a cell has left running must not keep the process


if __name__ == "__main__":
    main()
