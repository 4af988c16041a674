"""A process that outlives the kernel: forked from its nursery, so torch is there, with a nursery of its own.

    kernel ── nursery ── fork ── nobody's child ── fork ── its nursery ── fork ── its ranks

What it does is a module's `main(end of a pipe to the kernel, shell)`. It begins before the kernel has told it anything.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from nbtrain.compat import widgets
from nbtrain.engines._local import directory, warm
from nbtrain.engines._local.nursery import Nursery

LOOK_UP = 0.01


def start(module: str) -> Connection[Any, Any]:
    """The kernel's end of the pipe, which ends when the process does."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        warm.warm().give("outlive", partial(live, module), end=theirs.fileno())
    return ours


def live(module: str, end: int, shell: Any) -> None:
    """All that the process does. `shell`: a rank's, whose namespace is `__main__`."""
    widgets.as_in_terminal(shell.config)  # no page belongs to it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, theirs = socket.socketpair()
    errors, parent = directory.unnamed(), os.getpid()
    if not (pid := os.fork()):
        os.setsid()
        os.close(end)
        ours.close()
        for stream in (1, 2):
            os.dup2(errors.fileno(), stream)
        own = Nursery(theirs, parent, in_notebook=False)
        own.shell, own.outlives = shell, True
        own.run()
        os._exit(0)
    theirs.close()
    warm.adopt(ours, Forked(pid), errors)
    import_module(module).main(end, shell)


class Forked:
    """A child that was forked, as `subprocess.Popen` has one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a nursery", timeout)
            time.sleep(LOOK_UP)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
