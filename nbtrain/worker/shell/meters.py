"""Sends a running cell's text up to twenty times a second, its speed and phases twice, memory and use once.

This goes on while the cell's own thread waits for other ranks, for data, or for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from nbtrain.events import Event
from nbtrain.worker.shell.gauges import Gauges
from nbtrain.worker.shell.output import FLUSH_EVERY, Outputs

SPEED_EVERY = 0.5
USE_EVERY = 1.0


class Meters:
    """One thread per rank, which sleeps while no cell runs and nothing was printed."""

    def __init__(self, rank: int, outputs: Outputs, send: Callable[[Event], None], look: Callable[[int], None]) -> None:
        """`look` is called twenty times a second with the number of the run."""
        self._outputs = outputs
        self._send = send
        self._look = look
        self._gauges = Gauges(rank)
        self._number = 0
        self._readings: Callable[[], Iterable[Event]] | None = None
        self._began = 0.0
        self._awake = outputs.outlet.waiting
        self._saying = threading.Lock()
        """nothing of a cell is sent after `end`: it would count for the next one"""
        threading.Thread(target=self._loop, name="nbtrain-meters", daemon=True).start()

    def begin(self, readings: Callable[[], Iterable[Event]], number: int) -> None:
        """`readings()` returns the rank's present figures as events."""
        self._number = number
        self._began = time.monotonic()
        self._gauges.begin()
        self._readings = readings
        self._awake.set()

    def end(self) -> None:
        """Send the last figures of a cell, unless it was too short for any."""
        with self._saying:
            readings, self._readings = self._readings, None
        if readings is not None and time.monotonic() - self._began >= SPEED_EVERY:
            self._say(readings)

    def _say(self, readings: Callable[[], Iterable[Event]]) -> None:
        for event in readings():
            self._send(event)

    def _loop(self) -> None:
        speed = use = 0.0
        while True:
            self._awake.wait()
            time.sleep(FLUSH_EVERY)
            if self._readings is not None:
                self._look(self._number)
            self._outputs.drain()
            self._outputs.outlet.flush()
            with self._saying:
                readings, now = self._readings, time.monotonic()
                if readings is None:
                    continue
                self._awake.set()
                self._outputs.outlet.announce()
                if now - self._began < SPEED_EVERY:
                    continue
                if now - speed >= SPEED_EVERY:
                    speed = now
                    self._say(readings)
                if now - use >= USE_EVERY:
                    use = now
                    self._send(self._gauges.use())
                    self._send(self._gauges.memory())
