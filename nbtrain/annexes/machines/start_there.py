"""How a node is started on another machine: what a shell does there, what a child of ours that leads there has said,
and what its end means.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import IO

from nbtrain.base.awake_time import AwakeTimeout

KEPT = 30
"""lines that are kept of what is said there"""
SHOWN = 6
"""of those, the last ones that an error shows"""
NOISE = "cluster configuration lacks support for cpu binding"
"""What srun says to --cpu-bind=none where nothing is bound in any case."""
NO_PYTHON = 127
"""what a shell ends with that does not find a command"""


def python_there(named: str) -> str:
    """Statements of a shell that put a Python's path into `p`: the one that is named; else the notebook's own path, if
    it leads to a Python there, too."""
    if named:
        return f"p={shlex.quote(named)}"
    return f'p={shlex.quote(sys.executable)}; command -v "$p" >/dev/null 2>&1 || p=python3'


class Child:
    """A child process that leads to other machines (`ssh`, `srun`), with the last lines of what is said there."""

    def __init__(self, argv: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT)
        self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # the notebook's Stop interrupts its process group
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, said: IO[bytes]) -> None:
        with said:
            for line in said:
                self.lines.extend(worth_saying(line.decode(errors="replace")))

    def write(self, line: str) -> None:
        with suppress(OSError):  # it has ended, which `status` says
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(0.2)  # its last words
        return code

    @property
    def complaint(self) -> str:
        """The last line that was said, if it is one."""
        return complaint(list(self.lines))

    def no_more(self) -> None:
        """Nothing more is written to it."""
        with suppress(OSError):
            self._stdin.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)  # does nothing to one that has ended


def end(children: Sequence[Child], grace: float) -> None:
    """Returns once all have ended; after so many seconds they are made to."""
    for child in children:
        child.no_more()
    for number, seconds in ((0, grace), (signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)):
        patience = AwakeTimeout(seconds)
        for child in children:
            if number and child.status is None:
                child.signal(number)
        while any(child.status is None for child in children) and not patience.over:
            time.sleep(0.01)


def worth_saying(text: str) -> list[str]:
    """Its lines that may tell something."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and NOISE not in line]


def complaint(lines: Sequence[str]) -> str:
    """The last of these lines, unless all is well."""
    last = lines[-1].removeprefix("nbtrain: ") if lines else ""
    return "" if last.startswith("joined ") else last


def why_ended(where: str, status: int | None, lines: Sequence[str]) -> str:
    """Why there is no node on this machine, with the last lines that were said there. `status`: the shell's, where it
    is known."""
    text = "\n".join(lines)
    version = metadata.version("nbtrain")
    lacking = re.search(r"No module named '?([\w.]+)", text)
    if lacking and lacking[1].partition(".")[0] == "nbtrain":
        what = f"no nbtrain there: pip install nbtrain=={version} on it, or name the Python that has it with --python"
    elif lacking:
        what = f"no {lacking[1]} there: install on it what the notebook has, or name another Python with --python"
    elif status == NO_PYTHON or f"exit code {NO_PYTHON}" in text:
        what = "no Python there: name one with --python /its/path/bin/python"
    else:
        what = "its node has ended" + (f" with exit code {status}" if status else "")
    return f"{where}: {what}{shown(lines)}"


def shown(lines: Sequence[str]) -> str:
    """`. It said:` and the last lines; empty where there are none."""
    last = lines[-SHOWN:]
    return "".join([". It said:", *(f"\n  {line}" for line in last)]) if last else ""
