"""A machine's end, without a kernel: what it keeps while it has ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.base.specs import MachinesWanted, PoolSpec, RankInfo
from nbtrain.engines.remote.protocol import StartRanks
from nbtrain.machine.leases import Lease
from tests.support.stub_nodes import StubNode

CARDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
IS_FREE = "import sys; from nbtrain.machine.leases import Lease; print(Lease().add(sys.argv[1]))"


@pytest.fixture
def node() -> Any:
    made: Any = StubNode(SimpleNamespace(), lambda line: None)  # type: ignore[arg-type]
    made._kernel = SimpleNamespace(fileno=lambda: 0, send=lambda *said: None)
    return made


def start(kind: str, uuids: tuple[str, ...]) -> StartRanks:
    devices = ("cuda:0", "cuda:1") * 2 if kind == "cuda" else ("cpu",) * 4
    wanted = MachinesWanted(nodes=2)
    spec = PoolSpec(engine="elastic", kind=kind, devices=devices, uuids=uuids, nodes=2, machines=wanted)
    ranks = tuple(
        RankInfo(rank=rank, local_rank=rank - 2, world_size=4, device=devices[rank], nodes=2, threads=1)
        for rank in (2, 3)
    )
    return StartRanks(generation=1, spec=spec, ranks=ranks, store="", address="", master="", environ={})


def test_the_cards_of_its_ranks_are_leased_while_it_has_them(node: Any) -> None:
    """Other notebooks on that machine do not take them for free. Those of other machines' ranks are not its own."""
    for _ in range(2):
        node._start(start("cuda", CARDS))
        assert [Lease().holder(card) for card in CARDS] == [None, None, os.getpid(), os.getpid()]
    command = [sys.executable, "-c", IS_FREE, "GPU-c"]
    assert subprocess.check_output(command, text=True).strip() == "False"
    node._stop(kill=True)
    assert [Lease().holder(card) for card in CARDS] == [None] * 4
    assert subprocess.check_output(command, text=True).strip() == "True"


def test_on_cpus_there_is_nothing_to_lease(node: Any) -> None:
    node._start(start("cpu", ()))
    node._stop(kill=True)
    assert not [card for card in CARDS if Lease().holder(card)]
