"""What is said of the ranks' memory when it ran out."""

from __future__ import annotations

import os

from nbtrain.events import Memory
from nbtrain.session.report.oom_report import ON_A_GPU, readings

GB = 10**9


def test_what_each_rank_had() -> None:
    said = readings({0: Memory(rank=0, time=0.0, process=3 * GB)}, {0: os.getpid()}, "Less.")
    assert said.startswith("Memory: rank 0 had 3 GB a moment ago, ")
    assert said.endswith("of it are free now. Less.")


def test_on_a_gpu_what_its_allocator_did_and_what_needs_less() -> None:
    last = {1: Memory(rank=1, time=0.0, process=GB, allocated=7 * GB, reserved=8 * GB, peak=8 * GB, retries=2)}
    said = readings(last, {1: os.getpid()}, "Less.")
    assert "7 GB of its GPU, 8 GB at most, its allocator's cache emptied 2 × to get that" in said
    assert said.endswith(ON_A_GPU)
    assert "foreach=False" in said
    assert "memory_summary" in said
