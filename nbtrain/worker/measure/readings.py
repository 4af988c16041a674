"""What is read of a running cell, from any thread: its phase, how fast it is, and how far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from nbtrain.base.events import Event, Phases
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.measure.flop_count import FlopCount
from nbtrain.worker.measure.phases import PhaseTimer
from nbtrain.worker.parts import Cell, Part


class Readings(Part):
    """The figures of a rank."""

    def __init__(
        self, rank: int, steps: Steps, phases: PhaseTimer, operations: FlopCount, waits: Callable[[], str]
    ) -> None:
        """`waits`: the collective in which the rank waits, in words."""
        self.rank, self.steps, self.phases, self.operations, self.waits = rank, steps, phases, operations, waits

    def begin(self, cell: Cell) -> None:
        self.phases.begin(bool(cell.models or cell.optimizers))
        self.operations.begin()

    def end(self, ok: bool) -> None:
        self.operations.end()
        self.phases.end()

    def events(self) -> list[Event]:
        """Where the rank is: phase, throughput, progress. Also just after a cell."""
        rank, steps, operations, seconds = self.rank, self.steps, self.operations, self.phases.seconds()
        now = self.phases.word(steps.loading)
        spent = Phases(rank=rank, time=time.time(), steps=steps.count, seconds=seconds, now=now, within=self.waits())
        throughput = replace(steps.throughput(), operations=operations.total, fastest=operations.fastest)
        progress = steps.progress()
        return [spent, throughput] if progress is None else [spent, throughput, progress]
