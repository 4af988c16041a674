"""Daemons that a test starts: found, waited for until they answer, and gone at its end with all that they started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.absent import absent
from tests.support.hygiene import alive, describe, gone_within, marked

MARK = "NBTRAIN_TEST_DAEMONS"
"""In the environment of the daemons of one test, and of what they start: an orphan of theirs is still theirs."""

GRACE = 5.0
"""Seconds that a daemon gets to end by itself."""


def program(name: str, package: str) -> str:
    """Its path, also where only root has it on PATH; the test is left out where there is none."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    if (found := shutil.which(name, path=path)) is None:
        absent(f"no {name}", f"apt-get install {package}")
    return found


def free_ports(count: int) -> list[int]:
    """Of 127.0.0.1, and all different."""
    with ExitStack() as probes:
        taken = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in taken]


class Daemons:
    """Those of one test; what they say is in folder/NAME.log."""

    def __init__(self, folder: Path, others: Callable[[], list[psutil.Process]] = list) -> None:
        self.folder = folder
        self.environment = {MARK: uuid.uuid4().hex}
        """What marks a process as theirs."""
        self._others = others
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
        """In the foreground, as a child of the test's."""
        with open(self._log(name), "wb") as log:
            self._started[name] = subprocess.Popen(
                argv, env=os.environ | self.environment | environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self._started[name]

    def wait_until(self, ready: Callable[[], bool], timeout: float = 30) -> None:
        """Until all of them answer; what they said is in the error if they do not."""
        deadline = time.monotonic() + timeout
        while all(process.poll() is None for process in self._started.values()) and time.monotonic() < deadline:
            if ready():
                return
            time.sleep(0.05)
        said = (f"{name}: {self._log(name).read_text(errors='replace')[-2000:]}" for name in self._started)
        raise RuntimeError("\n".join([f"daemons did not come up in {timeout:g} s, or ended; they say:", *said]))

    def end(self) -> None:
        """The last one first, and then what they leave."""
        theirs: set[psutil.Process] = set()
        for process in reversed(self._started.values()):
            with suppress(psutil.Error):
                theirs.update(psutil.Process(process.pid).children(recursive=True))
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started.clear()
        if left := gone_within(GRACE, lambda: self._killed(theirs)):
            raise RuntimeError(f"daemons left behind: {'; '.join(left)}")

    def _killed(self, theirs: set[psutil.Process]) -> list[str]:
        left = [p for p in {*theirs, *marked(MARK, self.environment[MARK]), *self._others()} if alive(p)]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return [describe(process) for process in left]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@contextmanager
def daemons(folder: Path, others: Callable[[], list[psutil.Process]] = list) -> Iterator[Daemons]:
    """`others`: processes of theirs that have no mark any more."""
    found = Daemons(folder, others)
    try:
        yield found
    finally:
        found.end()
