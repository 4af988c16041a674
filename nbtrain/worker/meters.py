"""What a rank says of itself while a cell runs: text ten to twenty times a second, speed twice, memory once."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import nbtrain.probes as probes
from nbtrain.events import Event, Memory
from nbtrain.training.steps import Steps
from nbtrain.worker.output import FLUSH_EVERY, Outputs

SPEED_EVERY = 0.5
MEMORY_EVERY = 1.0


class Meters:
    """One thread a rank; it sleeps while no cell runs and nothing was written."""

    def __init__(self, rank: int, outputs: Outputs, send: Callable[[Event], None], look: Callable[[int], None]) -> None:
        """`look` is called twenty times a second with the number of the run."""
        self.rank = rank
        self._outputs = outputs
        self._send = send
        self._look = look
        self._number = 0
        self._running: Steps | None = None
        self._began = 0.0
        self._awake = outputs.outlet.waiting
        threading.Thread(target=self._loop, name="nbtrain-meters", daemon=True).start()

    def begin(self, steps: Steps, number: int) -> None:
        self._number = number
        self._began = time.monotonic()
        self._running = steps
        self._awake.set()

    def end(self, steps: Steps) -> None:
        """The cell is over; where it stood is said once more, if it took long enough to be said at all."""
        self._running = None
        if time.monotonic() - self._began >= SPEED_EVERY:
            self._speed(steps)

    def _speed(self, steps: Steps) -> None:
        self._send(steps.throughput())
        progress = steps.progress()
        if progress is not None:
            self._send(progress)

    def _loop(self) -> None:
        speed = memory = 0.0
        while True:
            self._awake.wait()
            time.sleep(FLUSH_EVERY)
            if self._running is not None:
                self._look(self._number)
            self._outputs.drain()
            self._outputs.outlet.flush()
            steps, now = self._running, time.monotonic()
            if steps is None:
                continue
            self._awake.set()
            self._outputs.outlet.announce()
            if now - self._began < SPEED_EVERY:
                continue
            if now - speed >= SPEED_EVERY:
                speed = now
                self._speed(steps)
            if now - memory >= MEMORY_EVERY:
                memory = now
                self._send(self._memory())

    def _memory(self) -> Memory:
        torch: Any = sys.modules.get("torch")
        cuda = {}
        if torch is not None and torch.cuda.is_initialized():
            cuda = {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "peak": torch.cuda.max_memory_allocated(),
            }
        return Memory(rank=self.rank, time=time.time(), process=probes.private_memory(os.getpid()) or 0, **cuda)
