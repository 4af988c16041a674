"""accelerate: `notebook_launcher` forks the kernel for a function."""

from __future__ import annotations

from textwrap import indent

from benchmarks.peers.peer import Cannot, Peer

LAUNCH = """
def cell():
    from accelerate import PartialState
    PartialState(cpu=True)
{code}
notebook_launcher(cell, num_processes={ranks}, use_port=free_port())
"""
TRAIN = """
def train():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    global model, optimizer
    model, optimizer = accelerator.prepare(model, optimizer)
    {loop}
notebook_launcher(train, num_processes={ranks}, use_port=free_port())
"""
START = """
import socket
from accelerate import notebook_launcher
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])
"""
"""Its own port is the same for everybody on a machine (accelerate #508)."""


class Accelerate(Peer):
    name = "accelerate"
    packages = ("accelerate==1.15.0",)
    keeps_ranks = False

    def start(self, ranks: int) -> list[str]:
        return [START]

    def cell(self, code: str, ranks: int) -> str:
        if ranks == 1:
            raise Cannot("one process is the kernel itself: no rank is started")
        return LAUNCH.format(code=indent(code, "    "), ranks=ranks)

    send = cell

    def home(self, code: str, ranks: int) -> str:
        raise Cannot("returns nothing, not even values (accelerate #787)")

    def make_model(self, make: str, ranks: int) -> list[str]:
        return [make]

    def train(self, loop: str, ranks: int) -> str:
        return TRAIN.format(loop=loop.replace(")", ", backward=accelerator.backward)"), ranks=ranks)
