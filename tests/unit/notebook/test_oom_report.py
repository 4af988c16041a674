"""What is said of the ranks' memory when it ran out."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from nbtrain.base.events import Memory
from nbtrain.engines.base import Death, Frame
from nbtrain.machine import host
from nbtrain.notebook.report.exception_message import died
from nbtrain.notebook.report.oom_report import ON_A_GPU, of_the_dead, readings

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


HAD = "rank 1 had %s of 16 GB at most"
NO_MEMORY = f"It was probably not memory: {HAD % '300 MB'}."
ELSEWHERE = "the system's out-of-memory killer has ended a process of this machine meanwhile, in another cgroup"
SIGKILL = "SIGKILL can also come from a user, a job scheduler or a container's limit."
SIGSEGV = "Compiled code used memory that is not its own: an error in a library or an extension."
SIGABRT = "Compiled code gave up: a failed check of its own, which it usually prints."
SIGBUS = "A file in memory could not grow: /dev/shm is full, or it became shorter."


@pytest.mark.parametrize(("ended_by", "peak", "ranks", "killer", "says"), [
    ("SIGKILL", 0.3, 2, False, f"{SIGKILL} {NO_MEMORY}"),
    ("SIGKILL", 0.3, 1, True, f"The system's out-of-memory killer ended it: {HAD % '300 MB'}. Less."),
    ("SIGKILL", 2, 4, False, f"Memory probably ran out: {HAD % '2 GB'}. {SIGKILL} Less."),
    ("SIGKILL", 0.3, 1, None, f"Memory probably ran out: {ELSEWHERE}; {HAD % '300 MB'}. Less."),
    ("SIGKILL", 0, 1, True, "The system's out-of-memory killer ended it. Less."),
    ("SIGSEGV", 15, 1, True, SIGSEGV),
    ("SIGABRT", 15, 1, False, SIGABRT),
    ("SIGBUS", 0.3, 1, False, f"{SIGBUS} {NO_MEMORY}"),
    ("SIGTERM", 15, 1, True, "A user or a job scheduler sends SIGTERM."),
    ("SIGUSR1", 15, 1, True, ""),
    (None, 15, 1, True, ""),
])  # fmt: skip
def test_memory_is_spoken_of_where_it_is_the_likely_cause(
    monkeypatch: pytest.MonkeyPatch, ended_by: str | None, peak: float, ranks: int, killer: bool | None, says: str
) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(host=16 * GB, limit=16 * GB, available=8 * GB))
    number = None if ended_by is None else signal.Signals[ended_by].value
    death = Death(rank=1, pid=7, signal=number, code=None if number else 7, peak=int(peak * GB))
    assert of_the_dead(death, killer, ranks, lambda: "Less.") == says


def test_an_abort_after_an_allocation_that_failed_is_lack_of_memory() -> None:
    death = Death(rank=1, pid=7, signal=signal.SIGABRT, code=None)
    tail = "terminate called after throwing an instance of 'std::bad_alloc'"
    assert of_the_dead(death, False, less=lambda: "Less.", tail=tail) == "Memory ran out. Less."


def test_a_signal_without_a_name_is_a_number() -> None:
    death = Death(rank=1, pid=7, signal=signal.SIGRTMIN + 1, code=None, peak=GB)
    assert str(died([death], {}, {}, killer=False)).startswith(f"rank 1 (process 7) was ended by signal {death.signal}")


def test_on_another_machine_its_own_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(host=16 * GB, limit=16 * GB, available=8 * GB))
    death = Death(rank=1, pid=7, signal=9, code=None, peak=3 * GB, limit=4 * GB)
    assert of_the_dead(death, True).startswith("Memory probably ran out: rank 1 had 3 GB of 4 GB at most.")
    assert of_the_dead(replace(death, peak=GB), True).endswith("a container's limit. Rank 1 had 1 GB of 4 GB at most.")


def test_one_advice_is_enough_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(host=16 * GB, limit=16 * GB, available=8 * GB))
    deaths = [Death(rank=rank, pid=7, signal=9, code=None, peak=9 * GB) for rank in range(3)]
    assert str(died(deaths, {}, {}, killer=False, less=lambda: "Less.")).count("Less.") == 1


def test_the_line_of_the_cell_is_named_where_it_crashed_or_was_last_seen() -> None:
    cell = Frame("/tmp/ipykernel_1/2.py", 3, "<module>")
    seen = Death(rank=1, pid=7, signal=9, code=None, last_seen=(cell,))
    said = str(died([seen], {}, {cell.filename: 4}, killer=False))
    assert said.startswith("rank 1 (process 7) was ended by SIGKILL, last seen at Cell In[4], line 3\n")
    crashed = Death(rank=1, pid=7, signal=11, code=None, frames=(cell,), last_seen=(replace(cell, line=2),))
    said = str(died([crashed], {}, {cell.filename: 4}, killer=False))
    assert said.startswith("rank 1 (process 7) was ended by SIGSEGV at Cell In[4], line 3\n")
