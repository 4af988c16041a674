"""What a rank says of itself, also while its own thread waits for others or for data."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import nbtrain.machine.probes as probes
from nbtrain.worker.shell.gauges import Gauges
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

LISTEN = """
import json
from dataclasses import asdict
from nbtrain.engines.local import LocalPool
heard, poll = [], LocalPool.poll
def polled(self, seconds):
    found = poll(self, seconds)
    heard.extend((type(event).__name__, event) for event in found)
    return found
LocalPool.poll = polled
model = torch.nn.Linear(4, 2)
"""

WAIT = """%%distributed --devices 2
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(0.9); return torch.ones(4)
if rank == 1:
    for x in DataLoader(Slow()): model(x)
barrier()
"""


def test_it_goes_on_while_the_rank_waits(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    notebook(LISTEN)
    notebook(WAIT)
    kinds = "('Phases', 'Progress', 'Memory', 'Use', 'Throughput')"
    shown = notebook(f"print(json.dumps([(kind, asdict(event)) for kind, event in heard if kind in {kinds}]))")
    said: list[tuple[str, dict[str, Any]]] = json.loads(shown.stdout)

    def of(kind: str, rank: int) -> list[dict[str, Any]]:
        return [event for name, event in said if name == kind and event["rank"] == rank]

    waiting = [one for one in of("Phases", 0) if one["within"]]
    assert len(waiting) >= 2
    assert {(one["now"], one["within"]) for one in waiting} == {("communication", "in barrier")}
    assert waiting[-1]["seconds"][3] - waiting[0]["seconds"][3] > 0.3, "it grows while it waits"
    loading = [one for one in of("Phases", 1) if one["now"] == "data"]
    assert len(loading) >= 2
    assert loading[-1]["seconds"][0] - loading[0]["seconds"][0] > 0.3
    assert [one["total"] for one in of("Progress", 1)][:1] == [2]
    for rank in (0, 1):
        assert of("Throughput", rank)
        assert of("Memory", rank)[0]["process"] > 2**20
        assert of("Memory", rank)[0]["limit"] == probes.memory().limit
        assert 0 <= of("Use", rank)[-1]["processor"] < 0.9, "it sleeps"
    order = json.loads(notebook("print(json.dumps([(kind, event.rank) for kind, event in heard]))").stdout)
    for rank in (0, 1):
        kinds_of_it = [kind for kind, of_rank in order if of_rank == rank]
        assert kinds_of_it[-1] == "Finished", "what came later would be taken for the next cell's"


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

    monkeypatch.setattr(probes, "private_memory", private)
    monkeypatch.setattr("nbtrain.worker.shell.gauges.LIGHT", 1e9)
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
            is_initialized=lambda: True,
            memory_allocated=lambda: 10,
            memory_reserved=lambda: 20,
            max_memory_allocated=lambda: 15,
            memory_stats=lambda: {"num_alloc_retries": 3},
            current_device=lambda: 2,
            get_device_properties=lambda index: SimpleNamespace(total_memory=100 + index),
            utilization=utilization,
        ),
    )


def test_a_card_is_asked_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _card(87))
    gauges = Gauges(0)
    memory = gauges.memory()
    assert (memory.allocated, memory.reserved, memory.peak) == (10, 20, 15)
    assert (memory.limit, memory.retries) == (102, 3)
    assert abs(memory.process - (probes.private_memory(os.getpid()) or 0)) < 2**24
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
    assert memory.limit == probes.memory().limit
    assert memory.retries == memory.allocated == 0
    assert Gauges(0).use().card is None
