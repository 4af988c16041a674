"""The packages that take part, in the order of the table's columns."""

from __future__ import annotations

from benchmarks.peers.accelerate import Accelerate
from benchmarks.peers.ipyparallel import IPyParallel
from benchmarks.peers.jupyter_distributed import JupyterDistributed
from benchmarks.peers.lightning import Lightning
from benchmarks.peers.nbdistributed import NBDistributed
from benchmarks.peers.nbtrain import NBTrain
from benchmarks.peers.peer import Peer
from benchmarks.peers.ray import Ray
from benchmarks.peers.torchrunx import TorchRunX

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        NBTrain(),
        IPyParallel(),
        NBDistributed(),
        JupyterDistributed(),
        Accelerate(),
        Lightning(),
        TorchRunX(),
        Ray(),
    )
}
