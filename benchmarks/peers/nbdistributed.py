"""nbdistributed: `%dist_init`, then `%%distributed` sends a cell's text to worker processes."""

from __future__ import annotations

from benchmarks.peers.peer import Cannot, Peer

LOOPBACK = """
import zmq
bind = zmq.Socket.bind
zmq.Socket.bind = lambda self, address: bind(self, address.replace("tcp://*", "tcp://127.0.0.1"))
"""
"""Its socket listens on every interface and unpickles what it gets; here it listens on this machine alone."""


class NBDistributed(Peer):
    name = "nbdistributed"
    packages = ("nbdistributed==0.1.0",)

    def start(self, ranks: int) -> list[str]:
        return [LOOPBACK, "%load_ext nbdistributed", f"%dist_init -n {ranks} -a 127.0.0.1"]

    def cell(self, code: str, ranks: int) -> str:
        return f"%%distributed\n{code}"

    def send(self, code: str, ranks: int) -> str:
        raise Cannot("sends the text of cells; no object of the notebook reaches a rank")

    def home(self, code: str, ranks: int) -> str:
        raise Cannot("brings nothing home; a name of the ranks becomes a tensor of zeros in the notebook")
