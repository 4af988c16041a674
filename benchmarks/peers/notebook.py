"""A kernel in the environment of a package, with ranks that have met; what a cell does in it, what is left of it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

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
        if result.error is not None:
            last = (result.error.evalue.strip().splitlines() or [""])[-1]
            raise Raised(f"raises {result.error.ename}: {last[:160]}")
        return result

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
        file = self.file()
        result = self.run(self.peer.cell(f"{WORK}.meet({file!r})", self.ranks))
        found = work.told(file)
        if result.error is not None or any(total != self.ranks for _, total in found.values()):
            raise Raised(f"its ranks do not meet: {result.error.evalue if result.error else found}")
        if len(found) != self.ranks:
            raise Raised(f"its cell is lost: {len(found)} of {self.ranks} ranks run it. {_last_line(result)}")
        return [pid for _, (pid, _) in sorted(found.items())]

    def get_ready(self) -> str:
        """Start ranks, and have them meet; what is to be said of that."""
        for cell in self.peer.start(self.ranks):
            self.good(cell)
        try:
            self.meet()
        except Raised as lost:
            self.meet()
            return str(lost)
        return ""

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
                notebook = stack.enter_context(open_notebook(peer, ranks))
                notebook.get_ready()
                found[peer.name] = notebook
            except Cannot as why:
                failed[peer.name] = str(why)
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
