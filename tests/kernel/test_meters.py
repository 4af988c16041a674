"""What a rank says of itself while its own thread waits."""

from __future__ import annotations

import json
from typing import Any

import pytest

import nbtrain.machine.host as host
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


@pytest.mark.thorough
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
        assert of("Memory", rank)[0]["limit"] == host.memory().limit
        assert 0 <= of("Use", rank)[-1]["processor"] < 0.9, "it sleeps"
    order = json.loads(notebook("print(json.dumps([(kind, event.rank) for kind, event in heard]))").stdout)
    for rank in (0, 1):
        kinds_of_it = [kind for kind, of_rank in order if of_rank == rank]
        assert kinds_of_it[-1] == "Finished", "what came later would be taken for the next cell's"
