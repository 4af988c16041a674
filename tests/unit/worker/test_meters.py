"""The rank's second thread, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.base.events import Event, Throughput
from nbtrain.worker.shell.meters import Meters
from nbtrain.worker.shell.output import Outlet

PATIENCE = 20.0


class Rank:
    """A cell's thread that says when its figures are read, and waits until it may go on."""

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)
        self.reading = threading.Semaphore(0)
        self.logged = threading.Semaphore(0)
        sent: list[Event] = []
        self.outlet = Outlet(0, sent.append)
        self.over = False
        outputs: Any = SimpleNamespace(outlet=self.outlet, drain=self.drain)
        place: Any = SimpleNamespace(noted=False, clear=lambda: None, note=lambda: None)
        self.meters = Meters(0, outputs, sent.append, lambda _: self.looked.release(), place)

    def drain(self) -> None:
        """Ends the thread, which otherwise lives as long as its process."""
        if self.over:
            raise SystemExit

    def readings(self) -> list[Event]:
        self.reading.release()
        assert self.logged.acquire(timeout=PATIENCE)
        return [Throughput(rank=0, time=0.0, steps=1, samples=1, seconds=1.0)]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    made.meters.begin(made.readings, 1)
    yield made
    for _ in range(2):  # the thread's own reading, and that of `end`
        made.logged.release()
    made.meters.end()
    made.over = True
    made.outlet.waiting.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is ended by SystemExit
def test_figures_go_on_while_the_cell_sends_what_it_logs_itself(rank: Rank) -> None:
    """A slow loop sends each value as it comes: that nothing waits to be sent is no reason to sleep."""
    for step in range(3):
        assert rank.reading.acquire(timeout=PATIENCE), f"no figures after step {step}"
        rank.outlet.log(step, {"loss": 1.0})
        rank.outlet.flush()
        rank.logged.release()
    while rank.looked.acquire(blocking=False):
        pass
    assert rank.looked.acquire(timeout=PATIENCE), "Stop is seen by this thread, too"
