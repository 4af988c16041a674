"""A node that ends when whoever has started it does: `python -m nbtrain.annexes.machines.watched_node`.

Its standard input has the ticket in the first line, where nobody who lists processes sees it, and stays open: when it
is closed, by whatever end of the other side, the node leaves. A process that is killed cannot end others, and this
needs none of them to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from nbtrain.engines.remote.node import main as take_part

GRACE = 5.0
"""Seconds for the node to end its ranks. One that looks for the kernel does not listen."""


def main() -> int:
    # A daemon's children may have it blocked, and ranks would inherit that: Stop is a SIGINT.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ticket = sys.stdin.readline()
    watched = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # ranks read nothing from it
    threading.Thread(target=_watch, args=(watched,), name="nbtrain-watch", daemon=True).start()
    return take_part([ticket])


def _watch(watched: int) -> None:
    while os.read(watched, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)  # its ranks end with it


if __name__ == "__main__":
    sys.exit(main())
