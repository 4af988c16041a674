"""Forms the ranks' process group, frees ranks that wait in it for a dead peer, and forms it again in milliseconds.

A rank inside gloo hears no signal, and gloo's own `abort` does not free it. Shutting down the connections does: every
rank that waits in a collective gets a RuntimeError at once. So each group's sockets are noted while it is formed,
those of the groups a cell makes too.

Where a script ends its group and forms another at the same address, as with torchrun, rank 0's store of the first may
still listen when another rank comes for the second: that rank would read old addresses there, and lose the store with
rank 0's end of the first. So it waits until rank 0 has come as far, which the board tells.
"""

from __future__ import annotations

import ctypes
import datetime
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RankInfo
from nbtrain.compat import groups
from nbtrain.compat.intercept import Listeners
from nbtrain.worker.loop.shared_board import FORMING, Board

A_MONTH = datetime.timedelta(days=30)
"""Collectives wait this long for a slow peer: there is no time limit on user code."""
LATE = 20_000_000
"""Nanoseconds by which gloo's threads may be late with looking up; a group that is left waits for them so long."""
SOON = 0.002
"""Seconds between two looks at how far rank 0 is."""
TWO = (
    "init_process_group: the ranks have a process group already, and their strategy distributes the training; a script "
    "that does that itself runs under %%distributed -s none"
)
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


class RankGroup:
    """One rank's process group. `give_up` may be called from any thread."""

    def __init__(self, info: RankInfo, backend: str, board: Board | None = None, address: str = "") -> None:
        """`address`: this machine's, where ranks are on others too."""
        self.info = info
        self.board = board
        self.backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        self._address = address
        self._sockets: set[tuple[int, int]] = set()
        """descriptor and inode: the number alone may be another's by now"""
        self._lock = threading.Lock()
        self._ours: Any = None
        self._listeners = Listeners()
        self._own_code: bool | None = None
        """whether the running cell may form groups itself; None between cells"""
        self._asked = False
        """the cell called init_process_group"""
        self._run = self._formed = 0
        """the cell's number, and how many groups of all ranks it has formed"""
        self._before: set[tuple[int, int]] | None = None
        """sockets that were open before the group that is being formed"""
        self._cut_short = False
        """forming a group in the cell failed"""

    def begin(self, hands_off: bool, run: int = 0) -> None:
        """A cell is about to run. `hands_off`: under a strategy that leaves its process group to it."""
        self._own_code, self._asked = hands_off or self.info.world_size == 1, False
        self._run, self._formed = run, 0

    def end(self) -> None:
        self._own_code = None

    def form(self, store: str) -> None:
        """Collective. `store`: a file that no group was formed with before: it would hand out dead addresses."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        self._watch()
        if self.info.world_size == 1:
            return
        dist.init_process_group(
            self.backend,
            store=_open_store(store, self.info.world_size),
            rank=self.info.rank,
            world_size=self.info.world_size,
            timeout=A_MONTH,
        )
        self._ours = dist.group.WORLD

    @property
    def intact(self) -> bool:
        """False once a cell has destroyed or replaced the group."""
        if self.info.world_size == 1:
            return True
        import torch.distributed as dist

        return dist.is_initialized() and dist.group.WORLD is self._ours

    def give_up(self) -> None:
        """Make every collective that waits, here or on another rank, raise now."""
        with self._lock:
            if self._before is not None:
                self._sockets |= _sockets() - self._before
            for descriptor, inode in self._sockets:
                _shut(descriptor, inode, self._address)
            self._sockets.clear()
        if "nccl" in self.backend and self._ours is not None:
            with suppress(Exception):  # it may be going down by itself
                groups.abort()

    def dissolve(self) -> None:
        """Destroy the group. Not collective: the others may be gone."""
        import torch.distributed as dist

        self.give_up()
        self._ours = None
        with suppress(Exception):  # a cell may have destroyed it, or half of it
            dist.destroy_process_group()
        if self._cut_short:
            self._cut_short = False
            _reset_group_count()
        self._listeners.close()

    def _watch(self) -> None:
        """Note the sockets of every group that is made from here on, those of a cell's `new_group` too."""
        self._listeners.listen(groups.MAKE, "group", self._noted)
        self._listeners.listen("torch.distributed.init_process_group", "group", self._asked_for)

    def _asked_for(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Code that brings its own group is given ours where it asks for one like it, else the one it asks for."""
        import torch.distributed as dist

        names = inspect.signature(old)

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            if self._own_code is None:
                return old(*args, **kwargs)
            if not self._own_code:
                raise NotSupported(TWO)
            asked_before, self._asked = self._asked, True
            if dist.is_initialized() and not asked_before:
                if self._is_ours(names.bind(*args, **kwargs).arguments):
                    return None
                dist.destroy_process_group()
            self._before = _sockets()
            self._cut_short = True
            try:
                if (again := self._again(names, args, kwargs)) is None:
                    old(*args, **kwargs)
                else:
                    old(**again)
                self._cut_short = False
                self._formed += dist.get_world_size() == self.info.world_size  # one of some ranks is theirs
            finally:
                self._before = None

        return init_process_group

    def _is_ours(self, asked: dict[str, Any]) -> bool:
        """Whether our group fits these arguments of `init_process_group`."""
        backends = {None, self.backend, "nccl"} if "nccl" in self.backend else {None, self.backend}
        kinds: dict[str, tuple[Any, ...]] = {
            "backend": tuple(backends),
            "init_method": (None, "env://"),
            "world_size": (-1, self.info.world_size),
            "rank": (-1, self.info.rank),
        }
        return self.intact and all(value in kinds.get(name, (None, "")) for name, value in asked.items())

    def _again(self, names: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """Arguments, with a store, for forming another group at the same address; None if torch can do it alone."""
        import torch.distributed as dist

        if self.board is None or self.info.world_size == 1 or dist.is_initialized():
            return None
        rank, size = self.info.rank, self.info.world_size
        if not self._formed:
            return None
        asked = names.bind(*args, **kwargs).arguments
        url = str(asked.get("init_method") or "env://")
        if asked.get("store") is not None or _place(url, asked) != (str(rank), str(size)):
            return None
        mine = (self._run << 32) + self._formed
        self.board.parts[rank][FORMING] = mine
        timeout = asked.get("timeout") or dist.default_pg_timeout
        patience = AwakeTimeout(timeout.total_seconds())
        while self.board.parts[0][FORMING] < mine and not patience.over:
            time.sleep(SOON)
        store = groups.meet(url, rank, size, timeout, f"nbtrain/{mine}")
        asked.pop("init_method", None)
        return {**asked, "store": store, "rank": rank, "world_size": size}

    def _noted(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            before = _sockets()
            with _patient_threads():
                made = old(*args, **kwargs)
            with self._lock:
                self._sockets |= _sockets() - before
            return made

        return noting


def _open_store(store: str, world_size: int) -> Any:
    import torch.distributed as dist

    if not store.startswith("tcp://"):
        return dist.FileStore(store, world_size)
    host, _, name = store.removeprefix("tcp://").partition("/")
    host, _, port = host.rpartition(":")
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False))


def _place(url: str, asked: dict[str, Any]) -> tuple[str, ...]:
    """Rank and world size that a process forms its group with; empty: it does not meet the others at an address."""
    if url != "env://" and not (url.startswith("tcp://") and "?" not in url):
        return ()
    names = {"rank": "RANK", "world_size": "WORLD_SIZE"}
    given = ((asked.get(name, -1), os.environ.get(variable, "")) for name, variable in names.items())
    return tuple(told if value == -1 and url == "env://" else str(value) for value, told in given)


def _reset_group_count() -> None:
    """Torch counts groups that failed to form, and ranks with different counts do not find each other. Forming and
    destroying a group of one rank resets the count."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Gloo's threads poll a hundred times a second. Those made here inherit a larger timer slack, and poll together;
    data from the network wakes them at once as before."""
    if sys.platform != "linux":
        yield
        return
    prctl, put, get = ctypes.CDLL(None).prctl, 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK
    before = prctl(get, 0, 0, 0, 0)
    prctl(put, ctypes.c_ulong(LATE), 0, 0, 0)
    try:
        yield
    finally:
        prctl(put, ctypes.c_ulong(before), 0, 0, 0)


def _sockets() -> set[tuple[int, int]]:
    sockets = set()
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # the listing's own
            state = os.stat(int(name))
            if (state.st_mode & 0o170000) == 0o140000:  # a socket
                sockets.add((int(name), state.st_ino))
    return sockets


def _shut(descriptor: int, inode: int, address: str) -> None:
    with suppress(OSError):  # closed since, or never connected
        copy = os.dup(descriptor)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            # What a thread of the user's opened meanwhile was noted too; the group's stay on this machine, or come from
            # the address by which others know it.
            if connection.family == socket.AF_UNIX:
                return
            ours = connection.getsockname()[0].removeprefix("::ffff:")
            if ours != connection.getpeername()[0].removeprefix("::ffff:") and ours != address:
                return
            # Shutting down a listener ends the process.
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
