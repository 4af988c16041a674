"""`--start warm`: ranks forked from the nursery, ready in tens of milliseconds."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

import nbtrain.machine.host as host
from nbtrain.base.errors import PoolError
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.compat import widgets
from nbtrain.engines._local import directory, nursery
from nbtrain.engines._local.processes import death
from nbtrain.engines.base import Death

if TYPE_CHECKING:
    from nbtrain.worker.process.rank_config import RankConfig

PATIENCE = 10.0
"""Seconds in which a nursery that was stopped goes on when it is told to"""
FROZEN = 60.0
"""and one that is not given a moment of any processor, gets one."""
LOOK_UP = 0.5
"""Seconds between two looks at it while it is waited for."""
SPARE = 4 << 30
"""Bytes that must be free for a nursery that nobody has asked for yet: a class of thirty may share the host."""
_kept: Warm | None = None
_notebook_elsewhere = False
"""this is a node, and its notebook on another machine"""
_imports: dict[str, str] = {}
"""modules that ranks will want because the notebook has them → the file of their package"""


def warm() -> Warm:
    """The kernel's one nursery; started if there is none."""
    global _kept
    if _kept is None or not _kept.alive:
        if _kept is not None:
            _kept.close()
        else:
            atexit.register(close)
        _kept = _started()
    return _kept


def in_notebook() -> str:
    """An argument for processes that become ranks: `1` where a notebook shows their widgets. Libraries find that out
    when they are imported, which the nursery may do."""
    shown = widgets.there_are_widgets() if _notebook_elsewhere else widgets.in_notebook()
    return str(int(shown))


def foresee(*, notebook_elsewhere: bool = False) -> None:
    """Start the nursery early, so that it imports torch meanwhile, where the host has memory to spare."""
    global _notebook_elsewhere
    _notebook_elsewhere = notebook_elsewhere
    available = host.memory().available
    if sys.platform == "linux" and available is not None and available > SPARE:
        with suppress(OSError):  # the first cell tries again, and says what is wrong
            warm()


def foresee_import(module: str) -> None:
    """Ranks will import this, too: the nursery does it once for all of them, when it has nothing else to do."""
    if module not in _imports:
        _imports[module] = str(sys.modules[module.partition(".")[0]].__file__)
        if _kept is not None and _kept.owner == os.getpid() and _kept.alive:
            with suppress(PoolError):
                _kept.foresee_import(module, _imports[module])


def close() -> None:
    """End the nursery, and with it every rank it has forked."""
    global _kept
    if _kept is not None and _kept.owner == os.getpid():
        _kept.close()
    _kept = None


def adopt(sock: socket.socket, process: Process, errors: BinaryIO) -> None:
    """This process has a nursery already."""
    global _kept
    _kept = Warm(sock, process, errors)


def _started() -> Warm:
    """A new one. Starting it does not wait for it."""
    ours, theirs = socket.socketpair()
    errors = directory.unnamed()
    arguments = [str(theirs.fileno()), str(os.getpid()), in_notebook()]
    process = subprocess.Popen(
        [sys.executable, "-m", "nbtrain.engines._local.nursery", *arguments],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,
        env=environment(),
    )
    theirs.close()
    return Warm(ours, process, errors)


class Process(Protocol):
    """As `subprocess.Popen` has it."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...

    def wait(self, timeout: float = ..., /) -> object: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


class Warm:
    """The kernel's end of the nursery."""

    def __init__(self, sock: socket.socket, process: Process, errors: BinaryIO) -> None:
        self.owner = os.getpid()
        self.sock, self.process, self._errors = sock, process, errors
        self._told = select.poll()  # `select` knows no descriptor above 1023
        self._told.register(sock, select.POLLIN)
        self.ready = False
        self._whole = threading.Lock()
        """while a message is sent: a run in the background has a thread of its own"""
        self._lost = False
        self._generation = 0
        """of the pool whose ranks these are; answers that are for another are late"""
        self._pending = False
        """ranks were asked for and are not there yet"""
        self._pids: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        """rank → 0, of those that were asked for last"""
        self._awaited = False
        """an answer is due"""
        self._looked = self._went = 0.0
        """when it was last looked whether it goes on, and when it last did"""
        self._done: Any = None
        """what it had done by then"""
        for module, file in _imports.items():
            self.foresee_import(module, file)

    @property
    def alive(self) -> bool:
        return not self._lost and self.process.poll() is None

    @property
    def settled(self) -> bool:
        return not self.alive or not (self._pids or self._pending)

    def fileno(self) -> int:
        return self.sock.fileno()

    def launch(self, configs: Iterable[RankConfig]) -> None:
        """Ask for ranks; `news` tells when they are there."""
        configs = list(configs)
        if configs[0].generation != self._generation:
            self._pids, self._generation = {}, configs[0].generation
        for config in configs:  # a death that is told late is not that of the new one
            self._pids.pop(config.info.rank, None)
        self._pending = self._awaited = True
        self._asked = {config.info.rank: 0 for config in configs}
        self._say(("fork", self._generation, configs))

    def foresee_import(self, module: str, file: str) -> None:
        self._say(("import", module, file))

    def news(self) -> list[Death]:
        """Which ranks have died. Does not wait."""
        deaths: list[Death] = []
        if not self._told.poll(0):
            if self._awaited:
                self.attend()
            return deaths
        while self._told.poll(0):
            message = self._hear()
            self._awaited = self._pending
            if message[0] == "ready":
                self.ready = True
            elif message[1] != self._generation:
                continue  # it was given up, and the nursery told to end it
            elif message[0] == "forked":
                self._pids.update(message[2])
                self._pending = self._awaited = False
                if why := message[3]:
                    said = host.of_processes(why, starting=True) or why
                    lacking = self._asked.keys() - message[2].keys()
                    deaths += [Death(rank=rank, pid=0, signal=None, code=1, said=said) for rank in sorted(lacking)]
            elif message[0] == "died":
                _, _, rank, pid, status, peak = message
                if self._pids.get(rank) == pid:
                    del self._pids[rank]
                    deaths.append(death(rank, pid, status, peak))
        return deaths

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def kill(self, ranks: Iterable[int]) -> None:
        """At once, and by the nursery too, which may be importing: it knows of those that are just being forked."""
        pids = [self._pids[rank] for rank in ranks if rank in self._pids]
        for pid in pids:
            nursery.end_group(pid)
        self._awaited = True
        self._say(("kill", pids))

    def attend(self, at_once: bool = False) -> None:
        """While it is waited for: one that was stopped is told to go on, and one that does not is ended. Raises
        `PoolError` then."""
        now = time.monotonic()
        if now - self._looked < LOOK_UP and not at_once:
            return
        fresh, self._looked = now - self._looked > 10 * LOOK_UP, now
        stopped, done = host.progress(self.process.pid)
        if done is None:
            return
        if stopped:
            self.process.send_signal(signal.SIGCONT)
        if fresh or (done != self._done and not stopped):
            self._went, self._done = now, done
        elif now - self._went > (PATIENCE if stopped else FROZEN):
            self.process.kill()
            self._gone(f"it was {'stopped' if stopped else 'frozen'}, and did not go on")

    def give(self, *order: Any, end: int) -> None:
        """Ask for a process that has this end of a pipe."""
        try:
            with self._whole, shielded():
                nursery.send(self.sock, order)
                socket.send_fds(self.sock, [b"."], [end])
        except OSError:
            self._gone()

    def kill_scratch(self, pid: int) -> None:
        self._say(("kill", [pid]))

    def release(self) -> None:
        """The nursery goes on without the pool; ranks that it is still to fork end at once."""
        given_up, self._generation = self._generation, 0
        try:
            if not self.settled:
                self._say(("end", given_up))
        except PoolError:
            pass  # it is gone, and every rank with it
        finally:
            self._pids, self._pending = {}, False

    def close(self) -> None:
        self.sock.close()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()

    def _say(self, message: Any) -> None:
        self.attend(at_once=True)
        try:
            with self._whole, shielded():  # half a message would make nonsense of all that follows
                nursery.send(self.sock, message)
        except OSError:
            self._gone()

    def _hear(self) -> Any:
        try:
            with shielded():
                return nursery.receive(self.sock)
        except (EOFError, OSError):
            self._gone()

    def _gone(self, why: str = "") -> NoReturn:
        self._lost = True  # the next `warm()` starts another
        with suppress(subprocess.TimeoutExpired):  # what a frozen cgroup has ends when it goes on
            self.process.wait(5)
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip()
        if why := why or host.of_processes(said, starting=True):
            again = "Run the cell again to start a new one."
            raise PoolError(f"the process that ranks are forked from has ended: {why}. {again}")
        raise PoolError(
            f"the process that ranks are forked from ended with code {self.process.returncode}"
            + (f"; it said:\n{said[-2000:]}" if said else "; another process may have killed it")
            + "\nRun the cell again to start a new one."
        )


def environment() -> dict[str, str]:
    """The kernel's environment, and the place this nbtrain was imported from: a child must not find another."""
    here = str(Path(__file__).resolve().parents[3])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    # Where a rank has died, torch's threads in the others would print pages about that. `import torch` reads it once.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    return variables
