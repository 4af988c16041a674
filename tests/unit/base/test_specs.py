"""What follows from what a user asked for."""

from __future__ import annotations

import pytest

from nbtrain.base.specs import MachinesWanted, PoolSpec

CARDS = tuple(f"cuda:{number}" for number in range(4))
UUIDS = tuple(f"GPU-{number}" for number in range(4))
OTHERS = tuple(f"GPU-{number}" for number in range(4, 8))
TWO = MachinesWanted(nodes=2)


@pytest.mark.parametrize(("spec", "shares"), [
    (PoolSpec(kind="cuda", devices=CARDS, uuids=UUIDS), False),
    (PoolSpec(kind="cuda", devices=CARDS[:2] * 2, uuids=UUIDS[:2] * 2, nodes=2), True),
    (PoolSpec(kind="cuda", devices=CARDS * 2, uuids=(*UUIDS, *OTHERS), nodes=2, machines=TWO), False),
    # two nodes on one machine
    (PoolSpec(kind="cuda", devices=("cuda:0",) * 2, uuids=UUIDS[:1] * 2, nodes=2, machines=TWO), True),
    (PoolSpec(kind="cuda", devices=CARDS[:2], uuids=("MIG-a", "MIG-b")), True),
    (PoolSpec(kind="cuda", devices=CARDS[:1] * 2, uuids=UUIDS[:1] * 2, together=True), False),
])  # fmt: skip
def test_ranks_on_one_card_are_told_apart_for_nccl(spec: PoolSpec, shares: bool) -> None:
    assert (spec.backend, spec.shares_cards) == ("nccl", shares)


def test_ranks_on_cpus_use_gloo() -> None:
    spec = PoolSpec(devices=("cpu",) * 4, nodes=2, machines=TWO)
    assert (spec.backend, spec.shares_cards) == ("gloo", False)
