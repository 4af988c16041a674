"""What follows from what a user asked for."""

from __future__ import annotations

import pytest

from nbtrain.specs import MachinesWanted, PoolSpec

CARDS = tuple(f"cuda:{number}" for number in range(4))


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (PoolSpec(kind="cuda", devices=CARDS), "nccl"),
        (PoolSpec(kind="cuda", devices=CARDS[:2] * 2, nodes=2), "gloo"),
        (PoolSpec(kind="cuda", devices=CARDS * 2, nodes=2, machines=MachinesWanted(nodes=2)), "nccl"),
        (PoolSpec(kind="cuda", devices=("cuda:0",) * 4, nodes=2, machines=MachinesWanted(nodes=2)), "gloo"),
        (PoolSpec(devices=("cpu",) * 4, nodes=2, machines=MachinesWanted(nodes=2)), "gloo"),
    ],
)
def test_a_card_is_one_rank_s_on_each_machine_under_nccl(spec: PoolSpec, backend: str) -> None:
    assert spec.backend == backend
