"""What is said of the ranks' memory when it ran out."""

from __future__ import annotations

import os

import pytest

from nbtrain.engines.base import Death
from nbtrain.events import Memory
from nbtrain.machine import host
from nbtrain.session.report.oom_report import ON_A_GPU, of_the_dead, readings

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


@pytest.mark.parametrize(
    ("peak", "ranks", "killer", "begins", "advice"),
    [
        (2, 1, False, "`kill -9` does that", False),
        (2, 4, False, "That is what the system's out-of-memory killer sends, and `kill -9`: it had 2 GB", True),
        (9, 1, False, "That is what the system's out-of-memory killer sends", True),
        (2, 1, True, "The system's out-of-memory killer did that: it had 2 GB at most", True),
    ],
)
def test_after_a_sigkill_memory_is_spoken_of_where_it_is_the_likely_cause(
    monkeypatch: pytest.MonkeyPatch, peak: int, ranks: int, killer: bool, begins: str, advice: bool
) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(host=16 * GB, limit=16 * GB, available=8 * GB))
    death = Death(rank=1, pid=7, signal=9, code=None, peak=peak * GB)
    said = of_the_dead(death, killer, ranks, lambda: "Less.")
    assert said.startswith(begins)
    assert said.endswith("Less.") is advice
    assert ("Memory is not the likely cause: it had 2 GB at most, of 16 GB" in said) is not advice
