"""What Ray is asked for, and whether its cluster can ever have it."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.annexes.machines.ray_cluster import bundle, shortage
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import MachinesWanted

PLAIN = {"10.0.0.1": {"CPU": 8.0}, "10.0.0.2": {"CPU": 2.0}, "10.0.0.3": {"CPU": 4.0}}
CARDS = {"10.0.0.1": {"CPU": 0.0}, "10.0.0.2": {"CPU": 16.0, "GPU": 8.0}, "10.0.0.3": {"CPU": 16.0, "GPU": 4.0}}


@pytest.mark.parametrize(("machines", "wanted", "expected"), [
    (PLAIN, {"devices": 3}, {"CPU": 3}),
    (PLAIN, {"devices": "3"}, {"CPU": 3}),
    (PLAIN, {"devices": 0}, {"CPU": 1}),
    (PLAIN, {"devices": "auto"}, {"CPU": 4}),
    (PLAIN, {"devices": "auto", "nodes": 3}, {"CPU": 2}),
    (CARDS, {"devices": 2}, {"CPU": 2, "GPU": 2}),
    (CARDS, {"devices": 2, "accelerator": "cpu"}, {"CPU": 2}),
    (CARDS, {"devices": 0}, {"CPU": 1}),
    (CARDS, {"devices": -1}, {"CPU": 8, "GPU": 8}),
    (CARDS, {"devices": "auto", "nodes": 2}, {"CPU": 4, "GPU": 4}),
    ({}, {"devices": "auto"}, {"CPU": 4}),
])  # fmt: skip
def test_a_cpu_for_each_rank_and_a_gpu_where_there_are_some(
    machines: dict[str, dict[str, float]], wanted: dict[str, Any], expected: dict[str, int]
) -> None:
    assert bundle(MachinesWanted(**wanted), machines) == expected


@pytest.mark.parametrize(("machines", "wanted", "said"), [
    (PLAIN, {"devices": -1}, "no machine of the Ray cluster has one: write --devices 2"),
    (PLAIN, {"devices": 2, "accelerator": "gpu"}, "--accelerator gpu asks for GPUs"),
    (CARDS, {"devices": (0, 1)}, "Ray chooses them: write a number"),
    (CARDS, {"devices": "free:2"}, "Ray chooses them: write a number"),
    (CARDS, {"devices": 2, "accelerator": "tpu"}, "not on TPUs"),
])  # fmt: skip
def test_what_ray_cannot_be_asked_for(machines: dict[str, dict[str, float]], wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bundle(MachinesWanted(**wanted), machines)


def test_what_fits_is_not_short_also_where_one_machine_is_too_small() -> None:
    assert shortage(2, {"CPU": 4}, PLAIN) is None
    assert shortage(2, {"CPU": 4, "GPU": 4}, CARDS) is None


@pytest.mark.parametrize(("nodes", "asked", "machines", "said"), [
    (3, {"CPU": 4}, PLAIN, ["3 machines with 4 CPUs each are asked for", "10.0.0.2 (2 CPUs)",
                            "Write --nodes 2 or --devices 2"]),
    (1, {"CPU": 9}, PLAIN, ["1 machine with 9 CPUs is asked for", "Write --devices 8"]),
    (2, {"CPU": 1}, {"a": {"CPU": 2.0}}, ["2 machines with 1 CPU each", "cluster has 1: a (2 CPUs)", "--nodes 1"]),
    (3, {"CPU": 8, "GPU": 8}, CARDS, ["8 CPUs and 8 GPUs each", "10.0.0.1 (0 CPUs, 0 GPUs)", "--nodes 1,"]),
    (1, {"CPU": 1}, {}, ["cluster has 0", "Add machines"]),
])  # fmt: skip
def test_a_shortage_says_what_is_there_and_what_to_write(
    nodes: int, asked: dict[str, float], machines: dict[str, dict[str, float]], said: list[str]
) -> None:
    text = shortage(nodes, asked, machines)
    assert text is not None
    assert all(part in text for part in said), text
