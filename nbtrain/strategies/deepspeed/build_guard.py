"""Runs a command that does not outlive whoever started it: `python build_guard.py ninja -v`, with a pipe as its input.

When the pipe is closed, by whatever end its owner came to, everything in this session ends. ninja gives each compiler a
process group of its own, so that to kill a group would leave them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE = 2.0
"""seconds for ninja to end its compilers by itself"""


def main(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select.select([0], [], [], 0.05)[0] and not os.read(0, 1):
            _end(process)
            return 1
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    late = time.monotonic() + GRACE
    while process.poll() is None and time.monotonic() < late:
        time.sleep(0.05)
    for pid in _of_this_session():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _of_this_session() -> list[int]:
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if os.getsid(int(name)) == os.getsid(0):
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
