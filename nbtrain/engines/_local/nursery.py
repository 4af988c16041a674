"""Runs the process that ranks are forked from: torch, the shell and nbtrain are imported once, and it waits.

    kernel ── socket pair ── nursery ── fork ── rank 0
                                     └─ fork ── rank 1

It runs one thread and never touches CUDA, so a fork is safe at any time, takes tens of milliseconds, and
shares its pages. It lives in a session of its own: an interrupt that Jupyter sends to the kernel's process
group does not reach it. When the kernel ends, however it ends, the socket closes: the nursery ends every
rank with all that the rank has started, removes the directory, and goes.

On the socket, one pickle a message: to the nursery `("fork", generation, [RankConfig, ...])`, `("kill", [pid, ...])`,
`("end", generation)`, `("import", module, file)`, `("scratch",)` and `("outlive", live)` with the end of a pipe (see
`scratch.py` and `outliving.py`), from it
`("ready", pid)`, `("forked", generation, {rank: pid}, why)`, where `why` says what keeps the others from being there,
and `("died", generation, rank, pid, status, peak)`: the most memory it had. The generation says which pool is meant:
one may have been given up by the time that the nursery, still importing, gets to it.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from nbtrain.engines._local import directory
from nbtrain.worker.process import rank_imports
from nbtrain.worker.process.rank_config import dies_with_its_parent, print_error, signalled_with_its_parent

HEAD = struct.Struct("<I")
LOOK_UP = 0.5
"""Seconds between looks at whether the kernel is still its parent: somebody else may hold the socket open."""


def send(sock: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, 5)
    sock.sendall(HEAD.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """One message; EOFError when the other side is gone."""
    return pickle.loads(_exactly(sock, HEAD.unpack(_exactly(sock, HEAD.size))[0]))


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _drop_garbage() -> None:
    """What imports have left. Ranks that are forked before have its pages, and never touch them."""
    gc.unfreeze()
    gc.collect()


def _pass(number: int, frame: FrameType | None) -> None:
    """A handler: to ignore the signal would be passed on to programs that are started."""


def end_group(pid: int) -> None:
    """A rank leads a process group: its loader workers and subprocesses end with it."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


class Nursery:
    """Forks what the kernel asks for, and tells it which children ended."""

    def __init__(self, sock: socket.socket, parent: int, in_notebook: bool) -> None:
        """`in_notebook`: widgets of its ranks can be shown."""
        self.sock = sock
        self.in_notebook = in_notebook
        self.parent = parent
        self.children: dict[int, tuple[int, int]] = {}
        """pid → generation, rank; generation 0: a scratch process, which the kernel hears of by a pipe of its own"""
        self.directories: set[str] = set()
        self.shell: Any = None
        """given to one that is forked from another, which has imported all"""
        self.outlives = False
        """its process outlives the kernel: who ends a session or a job tells all processes of it, and that one ends its
        ranks after a whole step"""
        self._later: list[Callable[[], Any]] = []
        """what is still to be done before the first optimizer, the first sharded strategy, the first error"""
        self._importing = self._ended = False

    def run(self) -> None:
        signalled_with_its_parent(signal.SIGCONT)  # one that somebody has stopped goes on, and ends
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _pass if self.outlives else lambda *_: sys.exit(0))
        if self.shell is None:
            with self._not_orphaned():
                self._preload()
        signal.signal(signal.SIGCHLD, self._child_ended)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        send(self.sock, ("ready", os.getpid()))
        waiting = selectors.DefaultSelector()
        waiting.register(self.sock, selectors.EVENT_READ)
        waiting.register(woken, selectors.EVENT_READ)
        try:
            while os.getppid() == self.parent:
                # Ranks that were just forked have a cell to run, and want the processors.
                ready = waiting.select(LOOK_UP if self.children or not self._later else 0)
                if not ready and self._later:  # there is time for what is not needed at once
                    self._go_on(1)
                for key, _ in ready:
                    if key.fd == woken:
                        os.read(woken, 4096)
                    else:
                        self._obey()
                self._reap()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the kernel is gone
        finally:
            self._end()

    @contextmanager
    def _not_orphaned(self) -> Iterator[None]:
        """Imports take seconds in which nobody looks at the socket: end them when the kernel ends."""

        def look(number: int, frame: FrameType | None) -> None:
            if os.getppid() != self.parent:
                self._end()
                os._exit(0)

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_UP, LOOK_UP)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _preload(self) -> None:
        """Everything a rank needs before its first step. Single-threaded: nothing here computes."""
        gc.disable()  # imports make no garbage that is worth the time to look for it
        rank_imports.before_a_step()
        from nbtrain.worker.modules.local_modules import modules_at_start
        from nbtrain.worker.shell.shell import make_shell

        self.shell = make_shell(in_notebook=self.in_notebook)
        modules_at_start()
        gc.enable()
        gc.freeze()  # a collection in a rank would write to, and so copy, every page
        self._later = [*rank_imports.before_training(), self.shell.rehearse, _drop_garbage]

    def _go_on(self, many: int) -> None:
        """Do as many of the things that most ranks need later."""
        if not many:
            return
        with self._not_orphaned():
            gc.disable()
            self._importing = True
            for do in self._later[:many]:
                do()
            self._importing = False
            gc.enable()
            gc.freeze()
        del self._later[:many]

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        """The loop is woken, and tells the kernel; unless it imports, which takes a second."""
        self._ended = True
        if self._importing:
            self._importing = False
            while self._ended:  # another may end while this one is told
                self._ended = False
                self._reap()
            self._importing = True

    def _obey(self) -> None:
        order, *rest = receive(self.sock)
        if order == "fork":
            generation, configs = rest
            if not all(config.early for config in configs):
                self._go_on(len(self._later))
            forked, why = {}, ""
            try:
                for config in configs:
                    forked[config.info.rank] = self._fork(config)
            except OSError as error:  # no more processes, no memory
                why = str(error)
            send(self.sock, ("forked", generation, forked, why))
        elif order == "end":
            for pid, (generation, _) in self.children.items():
                if generation == rest[0]:
                    end_group(pid)
        elif order == "kill":
            for pid in rest[0]:
                if pid in self.children:
                    end_group(pid)
        elif order == "import":  # before what is left of imports is dropped
            self._later = [*self._later[:-1], partial(rank_imports.of_notebook, *rest), _drop_garbage]
        elif order == "scratch":
            self._go_on(len(self._later))
            self._fork_scratch()
        elif order == "outlive":
            self._go_on(len(self._later))
            self._fork_outliving(*rest)

    def _fork(self, config: Any) -> int:
        from nbtrain.worker.rank import Rank

        self.directories.add(config.directory)
        return self._child(config.generation, config.info.rank, lambda: Rank(config, self.shell).serve())

    def _fork_scratch(self) -> None:
        from nbtrain.worker.process.scratch_job import serve

        _, (end,), _, _ = socket.recv_fds(self.sock, 1, 1)
        with suppress(OSError):  # no more processes: the pipe ends, which says so
            self._child(0, 0, lambda: serve(end, self.shell))
        os.close(end)

    def _fork_outliving(self, live: Callable[[int, Any], None]) -> None:
        """Nobody's child, in a session of its own: what ends this process does not end it."""
        _, (end,), _, _ = socket.recv_fds(self.sock, 1, 1)

        def between() -> None:
            os.setsid()
            if not os.fork():
                live(end, self.shell)

        with suppress(OSError):  # no more processes: the pipe ends, which says so
            os.waitpid(self._forked(between), 0)
        os.close(end)

    def _child(self, generation: int, rank: int, live: Callable[[], None]) -> int:
        """A process that does this and ends, and ends with this one."""

        def with_this() -> None:
            dies_with_its_parent()
            os.setpgid(0, 0)
            live()

        pid = self._forked(with_this)
        self.children[pid] = generation, rank
        return pid

    def _forked(self, live: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.outlives:  # but for what the cell starts
                os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
            else:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.sock.close()
            live()
            code = 0
        finally:
            if code:
                print_error()
            os._exit(code)

    def _reap(self) -> None:
        for pid in list(self.children):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                generation, rank = self.children.pop(pid)
                end_group(pid)  # whatever it had started
                if generation:
                    send(self.sock, ("died", generation, rank, pid, status, usage.ru_maxrss))

    def _end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self.children:
            end_group(pid)
        for pid in self.children:
            with suppress(ChildProcessError):  # it was being told when this began
                os.waitpid(pid, 0)
        for path in self.directories:
            directory.remove(path)
        directory.sweep()  # that of a pool whose ranks had not been asked for yet


def main() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    sock, parent, in_notebook = map(int, sys.argv[1:])
    Nursery(socket.socket(fileno=sock), parent, bool(in_notebook)).run()


if __name__ == "__main__":
    main()
