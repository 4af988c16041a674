"""A kernel in the environment of a package, with ranks that have met; what a cell does in it, what is left of it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

import psutil

from benchmarks.peers import work
from benchmarks.peers.peer import Cannot, Peer
from tests.support.hygiene import GRACE, alive, gone_within, marked
from tests.support.kernels import Kernel, Result, private_home

LIMIT = 60.0
"""seconds that a cell may take; one that is not over then is said to hang"""
MARK = "NBTRAIN_PEERS"
"""in the environment of a notebook's kernel, and so of everything that its package starts"""
WORK = "__import__('benchmarks.peers.work', fromlist=['work'])"
"""the module as an expression: a name that a cell assigns may come home, and the notebook imports torch for it"""
SHARED = Path("/dev/shm")
ON_ONE_MACHINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


T = TypeVar("T")
Steps = Generator[tuple["Notebook", str], Result, T]
"""cells of a notebook, one after another; each is given its result"""


def together(all_steps: Sequence[Steps[T]], keep: bool = False) -> list[Any]:
    """Run the steps of several notebooks, each at its own pace but one cell of each at a time. `keep`: what one cannot
    is its result, and the others go on."""
    found: list[Any] = [None] * len(all_steps)
    running: dict[int, tuple[Notebook, Result]] = {}

    def go_on(at: int, step: Callable[[], tuple[Notebook, str]]) -> None:
        try:
            notebook, cell = step()
            running[at] = notebook, notebook.kernel.start(cell)
        except StopIteration as end:
            found[at] = end.value
        except Cannot as why:
            if not keep:
                raise
            found[at] = why

    for at, steps in enumerate(all_steps):
        go_on(at, partial(next, steps))
    while running:
        for at, (notebook, started) in list(running.items()):
            del running[at]
            try:
                result = notebook.wait(started)
            except Cannot as why:
                go_on(at, partial(all_steps[at].throw, why))
            else:
                go_on(at, partial(all_steps[at].send, result))
    return found


class Hangs(Cannot):
    """A cell did not end."""


class Raised(Cannot):
    """A cell ended with an exception that was not asked for."""


@dataclass(frozen=True)
class Left:
    """What is there when the kernel has ended and two seconds have passed."""

    processes: int
    sockets: int
    files: int

    def words(self) -> str:
        parts = [("processes", self.processes), ("listening sockets", self.sockets), ("files in /dev/shm", self.files)]
        return ", ".join(f"{number} {what}" for what, number in parts if number) or "nothing"


class Notebook:
    """Close it: what its package leaves behind is ended then."""

    def __init__(self, peer: Peer, ranks: int, home: Path) -> None:
        self.peer, self.ranks, self.home = peer, ranks, home
        self._files = _shared_files()
        self._asked = 0
        self._mark = uuid.uuid4().hex
        self.opened = time.perf_counter()
        own = {"PATH": os.pathsep.join([str(peer.python.parent), os.environ["PATH"]]), MARK: self._mark}
        environment = {**ON_ONE_MACHINE, **own, **peer.environment(ranks)}
        try:
            self.kernel = Kernel(home, environment, peer.within, str(peer.python))
        except RuntimeError as why:  # it never answers
            end_marked(self._mark)
            raise Raised(f"its kernel does not start: {why}") from None
        if peer.interrupts_by_message:
            assert self.kernel.manager.kernel_spec is not None
            self.kernel.manager.kernel_spec.interrupt_mode = "message"

    def run(self, cell: str) -> Result:
        """Run a cell to its end, whatever that is."""
        return self.wait(self.kernel.start(cell))

    def wait(self, started: Result) -> Result:
        try:
            return self._with_reply(self.kernel.wait(started, LIMIT))
        except TimeoutError:
            raise Hangs(f"hangs: the cell is not over after {LIMIT:g} s") from None
        except RuntimeError:
            raise Raised("the kernel dies") from None

    def _with_reply(self, result: Result) -> Result:
        """An error that is in the reply alone: it stops *Run All* as well as one that is shown."""
        asked = next(key for key, known in self.kernel._results.items() if known is result)
        with suppress(Empty):
            while (reply := self.kernel.client.get_shell_msg(timeout=5))["parent_header"].get("msg_id") != asked:
                pass
            content = reply["content"]
            if content["status"] == "error" and result.error is None:
                shown = {key: content.get(key, "") for key in ("ename", "evalue")}
                result.outputs.append({"type": "error", "traceback": content.get("traceback", []), **shown})
        return result

    def good(self, cell: str) -> Result:
        """The same; raises if the cell did."""
        result = self.run(cell)
        self._check(result)
        return result

    @staticmethod
    def _check(result: Result) -> None:
        if result.error is not None:
            last = (result.error.evalue.strip().splitlines() or [""])[-1]
            raise Raised(f"raises {result.error.ename}: {last[:160]}")

    def seconds(self, cell: str) -> float:
        began = time.perf_counter()
        self.good(cell)
        return time.perf_counter() - began

    def file(self) -> str:
        """A file in which ranks can tell something, and nobody has."""
        self._asked += 1
        return str(self.home / f"told-{self._asked}")

    def meet(self) -> list[int]:
        """A cell in which all ranks meet: their process ids."""
        return together([self._meeting()])[0]

    def get_ready(self) -> str:
        """Start ranks, and have them meet; what is to be said of that."""
        return together([self.getting_ready()])[0]

    def getting_ready(self) -> Steps[str]:
        for cell in self.peer.start(self.ranks):
            self._check((yield self, cell))
        try:
            yield from self._meeting()
        except Raised as lost:
            yield from self._meeting()
            return str(lost)
        return ""

    def _meeting(self) -> Steps[list[int]]:
        file = self.file()
        result = yield self, self.peer.cell(f"{WORK}.meet({file!r})", self.ranks)
        found = work.told(file)
        if result.error is not None or any(total != self.ranks for _, total in found.values()):
            raise Raised(f"its ranks do not meet: {result.error.evalue if result.error else found}")
        if len(found) != self.ranks:
            raise Raised(f"its cell is lost: {len(found)} of {self.ranks} ranks run it. {_last_line(result)}")
        return [pid for _, (pid, _) in sorted(found.items())]

    def processes(self) -> list[psutil.Process]:
        return self.kernel.children()

    def end(self, kill: bool) -> Left:
        """Shut the kernel down as Jupyter does, or kill it."""
        if kill:
            self.kernel.kill()
        else:
            self.kernel.client.stop_channels()
            with suppress(Exception):
                self.kernel.manager.shutdown_kernel()
        gone_within(GRACE, lambda: [str(process.pid) for process in marked(MARK, self._mark)])
        left = marked(MARK, self._mark)
        sockets = sum(_listening(process) for process in left)
        return Left(len(left), sockets, len(_shared_files() - self._files))

    def close(self) -> None:
        try:
            self.kernel.close()
        finally:
            end_marked(self._mark)


@contextmanager
def opened(peers: Sequence[Peer], ranks: int) -> Iterator[tuple[dict[str, Notebook], dict[str, str]]]:
    """A notebook of each, ranks ready; and what those could not that have none."""
    with ExitStack() as stack:
        found: dict[str, Notebook] = {}
        failed: dict[str, str] = {}
        for peer in peers:
            try:
                found[peer.name] = stack.enter_context(open_notebook(peer, ranks))
            except Cannot as why:
                failed[peer.name] = str(why)
        for name, ready in zip(
            list(found), together([one.getting_ready() for one in found.values()], keep=True), strict=True
        ):
            if isinstance(ready, Cannot):
                failed[name] = str(ready)
                del found[name]
        yield found, failed


@contextmanager
def open_notebook(peer: Peer, ranks: int) -> Iterator[Notebook]:
    """A notebook whose kernel is there, and nothing else yet."""
    with private_home() as home:
        notebook = Notebook(peer, ranks, home)
        try:
            yield notebook
        finally:
            notebook.close()


def end_marked(mark: str) -> None:
    """End the processes that have this mark in their environment, and no others."""
    for process in marked(MARK, mark):
        with suppress(psutil.Error):
            process.kill()


def _shared_files() -> set[str]:
    return {path.name for path in SHARED.iterdir()} if SHARED.is_dir() else set()


def _listening(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("inet")) if alive(process) else 0
    return 0


def _last_line(result: Result) -> str:
    lines = [line for line in result.text.strip().splitlines() if not line.startswith("<")]
    return (lines or [""])[-1][:160]
