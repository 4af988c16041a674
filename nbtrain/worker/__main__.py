"""A rank in a fresh interpreter (`--start spawn`): its config comes on standard input."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading


def _end_with_kernel(lifeline: int, directory: str) -> None:
    """Nothing is ever written to this pipe: reading from it ends when the kernel does, who can clean up no more."""
    os.read(lifeline, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    config = pickle.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    threading.Thread(target=_end_with_kernel, args=(int(sys.argv[1]), config.directory), daemon=True).start()
    from nbtrain.worker.main import Rank
    from nbtrain.worker.shell import make_shell

    Rank(config, make_shell()).serve()


if __name__ == "__main__":
    main()
