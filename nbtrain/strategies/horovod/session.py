"""Runs Horovod on our ranks while a cell runs: its rendezvous, its settings, and how a rank gets out of it.

Horovod's background threads talk to each other a thousand times a second, whether there is anything to do or not, so
it is up while a cell runs and not between cells: starting takes 0.1 s. Shutting down on one rank shuts it down on all
(its threads agree on it, whatever the ranks are doing), so a rank that leaves its cell early frees those that wait for
it in Horovod.
"""

from __future__ import annotations

import atexit
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import RankInfo
from nbtrain.compat.horovod import START, WAIT, forget_sent
from nbtrain.compat.intercept import Listeners
from nbtrain.machine import registry

LOOPBACK = "127.0.0.1"
NEVER = "3600"
"""Seconds that Horovod's threads wait for a peer's, which answer whatever Python does. A dead one is seen at once."""
SOON = 2.0
"""Seconds in which all threads have agreed on the end, if no process is stopped"""
NAPS = 2e-5, 1e-3
"""the shortest and the longest pause, in seconds, between two looks whether something has arrived"""


class HorovodSession:
    """Horovod in this process. All ranks call `start` together; each calls `stop` on its own."""

    def __init__(self, place: RankInfo) -> None:
        self.place = place
        self.up = False
        self._ending: threading.Thread | None = None
        self._listeners = Listeners()

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Start it and return `horovod.torch`. Collective, unless it runs. Arguments are those of `hvd.init`."""
        try:
            import horovod.torch as hvd
        except ImportError as error:
            line = registry.STRATEGIES["horovod"].needs.install
            raise UsageError(f"--strategy horovod: Horovod cannot be imported here ({error}): {line}") from error
        if self.up:
            return hvd
        if self._ending is not None:
            self._ending.join()
            self._ending = None
        if hvd.is_initialized():  # a cell's own, under another strategy
            hvd.shutdown()
        with _rendezvous(self.place) as port, _settings(self.place, port):
            hvd.init(*args, **kwargs)
            dist.barrier()  # then nobody needs the rendezvous any more
        atexit.unregister(hvd.shutdown)  # each `init` registers it
        atexit.register(hvd.shutdown)
        self._listeners.listen(START, "horovod", lambda old: lambda *args, **kwargs: self._init(hvd, *args, **kwargs))
        self._listeners.listen(WAIT, "horovod", lambda old: lambda handle: _wait(hvd, old, handle))
        self.up = True
        return hvd

    def stop(self) -> None:
        """Shut it down. Whoever waits in Horovod, here or on another rank, gets an error. Not collective."""
        if not self.up:  # perhaps it cannot be imported here
            return
        import horovod.torch as hvd

        self.up = False
        self._listeners.close()
        self._ending = threading.Thread(target=hvd.shutdown, name="horovod-shutdown", daemon=True)
        self._ending.start()
        self._ending.join(SOON)  # a rank that is stopped would keep this one for as long
        if self._ending.is_alive():
            return
        self._ending = None
        atexit.unregister(hvd.shutdown)
        forget_sent()

    def _init(self, hvd: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of a cell's own `hvd.init()`, which would not find the other ranks: each would train alone."""
        if args or kwargs or not hvd.is_initialized():  # process sets; or the cell has shut it down
            self.stop()
            self.start(*args, **kwargs)


def _wait(hvd: Any, old: Callable[[int], None], handle: int) -> None:
    """In the place of Horovod's own waiting, which is done in C, at full speed and deaf to interrupts."""
    nap, last = NAPS
    while not hvd.poll(handle):
        time.sleep(nap)
        nap = min(nap * 1.5, last)
    old(handle)


@contextmanager
def _rendezvous(place: RankInfo) -> Iterator[int]:
    """Rank 0 serves the rendezvous while the ranks meet. Yields its port. Collective."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask for this machine's name, over the network
            self.server_name, self.server_port = self.server_address[:2]

    server = None
    if place.rank == 0:
        server = Server((_meeting_place(), 0), RendezvousHandler, 0)
        local = place.world_size // place.nodes
        server.scope_size = {"global": place.world_size}
        server.scope_size |= {f"local_{_host(node)}": local for node in range(place.nodes)}
        server.scope_size |= {f"cross_{i}": place.nodes for i in range(local)}
        threading.Thread(target=server.serve_forever, args=(0.01,), name="horovod-rendezvous", daemon=True).start()
    try:
        port = torch.tensor([server.server_port if server is not None else 0])
        dist.broadcast(port, 0)
        yield int(port)
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _meeting_place() -> str:
    """Rank 0's address, as the other ranks' machines know it."""
    return os.environ.get("MASTER_ADDR") or LOOPBACK


def _host(node: int) -> str:
    return f"node{node}"


@contextmanager
def _settings(place: RankInfo, port: int) -> Iterator[None]:
    """Set the environment that Horovod reads once. A user's own settings count, except for rank and place."""
    network = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if sys.platform == "linux" else "lo0")
    cpu = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": network}
    ours = cpu | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": _meeting_place(),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": _host(place.node),
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.world_size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.world_size // place.nodes),
        "HOROVOD_CROSS_RANK": str(place.node),
        "HOROVOD_CROSS_SIZE": str(place.nodes),
    }
    for name, usual in {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": NEVER,
        "HOROVOD_STALL_CHECK_DISABLE": "1",  # that a rank waits is said by nbtrain
        "HOROVOD_LOG_LEVEL": "fatal",  # it would print to the cell's output when a rank is gone, which is said, too
    }.items():
        ours[name] = os.environ.get(name, usual)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
