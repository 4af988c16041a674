"""`--profile K`: torch's profiler over K steps of a rank. The notebook gets the trace and the dearest operators."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbtrain.base.events import PHASES, Phases, Profiled

WARM = 1
"""steps before: the first one makes the optimizer's state"""
ROWS = 40
"""operators that each rank tells, of which the notebook shows ten"""
OWN = "ProfilerStep"


class StepProfile:
    """The profile of one cell on one rank. `begin` and `end` around the cell."""

    def __init__(self, rank: int, steps: int, folder: str) -> None:
        """`folder`: where the trace is put."""
        self._rank = rank
        self._steps = steps
        self._path = os.path.join(folder, f"trace-{rank}.json")
        self._profiler: Any = None
        self._ended = 0
        self._over = False
        self._runtime: Any = None
        self._before: Callable[[], None] = lambda: None
        self._spent: tuple[float, ...] = ()
        self._began = self._seconds = 0.0

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime
        self._before, runtime.steps.ended = runtime.steps.ended, self._step_ended
        runtime.operations.end()  # counting operations would be most of what is found in a small model

    def end(self) -> Profiled:
        """What was found, however the cell has ended."""
        self._runtime.steps.ended = self._before
        self._stop()
        rank, now = self._rank, time.time()
        if self._profiler is None:
            return Profiled(rank=rank, time=now, steps=0)
        with suppress(OSError, RuntimeError):  # a full disk: the kernel says what it finds in place of a trace
            self._profiler.export_chrome_trace(self._path)
        return Profiled(
            rank=rank, time=now, steps=max(0, self._ended - WARM), path=self._path, seconds=self._seconds,
            waited=max(0.0, self._spent[PHASES.index("communication")]), operators=tuple(self._operators()),
        )  # fmt: skip

    def _step_ended(self) -> None:
        if not self._over:
            self._ended += 1
            if self._ended == WARM:
                self._start()
            elif self._ended == WARM + self._steps:
                self._stop()
        self._before()

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        devices = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *devices])
        self._profiler.start()
        self._spent, self._began = self._phases(), time.monotonic()

    def _stop(self) -> None:
        if self._over or self._profiler is None:
            return
        self._over = True
        self._seconds = time.monotonic() - self._began
        self._spent = tuple(now - then for now, then in zip(self._phases(), self._spent, strict=True))
        self._profiler.stop()

    def _phases(self) -> tuple[float, ...]:
        spent = (reading.seconds for reading in self._runtime.readings.events() if isinstance(reading, Phases))
        return next(spent, (0.0,) * len(PHASES))

    def _operators(self) -> list[tuple[str, int, float, float]]:
        rows = []
        for row in self._profiler.key_averages():
            device = getattr(row, "self_device_time_total", 0.0)
            rows.append((str(row.key), int(row.count), row.self_cpu_time_total / 1e3, device / 1e3))
        rows = [row for row in rows if not row[0].startswith(OWN)]
        return sorted(rows, key=lambda row: -(row[2] + row[3]))[:ROWS]
