"""What a rank says of itself: its memory, its use and its limits."""

from __future__ import annotations

import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import nbtrain.machine.host as host
from nbtrain.worker.shell.meters import Gauges


def test_use_is_that_since_the_last_reading() -> None:
    now = [100.0, 5.0]
    gauges = Gauges(1, lambda: now[0], lambda: now[1])
    now[:] = [102.0, 6.0]
    assert gauges.use().processor == 0.5
    assert gauges.use().processor == 0, "no time has passed"
    now[:] = [103.0, 9.0]
    assert gauges.use().processor == 3
    now[:] = [200.0, 9.0]
    gauges.begin()
    now[:] = [201.0, 9.25]
    assert gauges.use().processor == 0.25, "what was between two cells is nobody's"


def test_memory_that_was_just_written_to_counts_before_the_system_has_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []

    def private(pid: int) -> int:
        counted.append(pid)
        return 2**30

    monkeypatch.setattr(host, "private_memory", private)
    monkeypatch.setattr("nbtrain.worker.shell.meters.LIGHT", 1e9)
    monkeypatch.setattr(
        "time.thread_time", itertools.count().__next__
    )  # on a coarse clock counting takes no time at all
    gauges = Gauges(0, lambda: 100.0)
    assert abs(gauges.memory().process - 2**30) < 2**22
    held = bytearray(os.urandom(1)) * 2**26
    more = gauges.memory().process - 2**30
    assert abs(more - len(held)) < 2**23
    assert counted == [os.getpid()]


def _card(used: Any) -> Any:
    def utilization() -> int:
        if isinstance(used, Exception):
            raise used
        asked.append(1)
        return int(used)

    asked: list[int] = []
    return SimpleNamespace(
        asked=asked,
        cuda=SimpleNamespace(
            is_initialized=lambda: True, memory_allocated=lambda: 10, memory_reserved=lambda: 20,
            max_memory_allocated=lambda: 15, memory_stats=lambda: {"num_alloc_retries": 3}, current_device=lambda: 2,
            get_device_properties=lambda index: SimpleNamespace(total_memory=100 + index), utilization=utilization,
        ),
    )  # fmt: skip


def test_a_card_is_asked_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _card(87))
    gauges = Gauges(0)
    memory = gauges.memory()
    assert (memory.allocated, memory.reserved, memory.peak) == (10, 20, 15)
    assert (memory.limit, memory.retries) == (102, 3)
    gauges.begin()
    memory = gauges.memory()
    assert (memory.peak, memory.retries) == (10, 0), "15 and 3 were an earlier cell's"
    card = _card(87)
    card.cuda.max_memory_allocated = lambda: 17
    card.cuda.memory_stats = lambda: {"num_alloc_retries": 5}
    monkeypatch.setitem(sys.modules, "torch", card)
    assert (gauges.memory().peak, gauges.memory().retries) == (17, 2)
    gauges.begin()
    assert (gauges.memory().peak, gauges.memory().retries) == (10, 0)
    assert abs(memory.process - (host.private_memory(os.getpid()) or 0)) < 2**24
    assert gauges.use().card == 0.87


def test_a_driver_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _card(ModuleNotFoundError("pynvml"))
    monkeypatch.setitem(sys.modules, "torch", card)
    gauges = Gauges(0)
    assert gauges.use().card is None
    monkeypatch.setitem(sys.modules, "torch", working := _card(50))
    assert gauges.use().card is None
    assert not working.asked


def test_without_a_card_the_machine_is_the_limit() -> None:
    memory = Gauges(0).memory()
    assert memory.limit == host.memory().limit
    assert memory.retries == memory.allocated == 0
    assert Gauges(0).use().card is None
