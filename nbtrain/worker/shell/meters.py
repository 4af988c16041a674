"""The rank's second thread. It sends what was printed and logged (`output.py`) up to twenty times a second, between
cells too; of a running cell the speed and phases twice a second, and once the use of memory, processor and GPU.

This goes on while the cell's own thread waits for other ranks, for data, or forever.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

import nbtrain.machine.host as host
from nbtrain.base.events import Event, Memory, Use
from nbtrain.compat.python import frames_of
from nbtrain.worker.shell.output import FLUSH_EVERY, Outputs

SPEED_EVERY = 0.5
USE_EVERY = 1.0
LIGHT = 1000
"""The system counts a process's private memory for milliseconds, for a large one tens of them: it is asked again
after so many times as long."""


class Meters:
    """One thread per rank, which sleeps while no cell runs and nothing was printed."""

    def __init__(
        self, rank: int, outputs: Outputs, send: Callable[[Event], None], look: Callable[[int], None], place: LastPlace
    ) -> None:
        """`look` is called twenty times a second with the number of the run, and `place` notes where the cell is."""
        self._outputs = outputs
        self._send = send
        self._look = look
        self._place = place
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
        with self._saying:
            self._readings = readings
            self._awake.set()

    def end(self) -> None:
        """Send the last figures of a cell, unless it was too short for any."""
        with self._saying:
            readings, self._readings = self._readings, None
            if self._place.noted:
                self._place.clear()
        if readings is not None and time.monotonic() - self._began >= SPEED_EVERY:
            self._say(readings)

    def _note_place(self) -> None:
        with self._saying:
            if self._readings is not None:
                self._place.note()

    def _say(self, readings: Callable[[], Iterable[Event]]) -> None:
        for event in readings():
            self._send(event)

    def _sleep_unless_a_cell_runs(self) -> None:
        """Before what waits is sent, so that what comes later wakes this thread again. Nobody else lets it sleep: the
        cell's own thread sends, too, and would do so for the whole of a slow loop that logs at every step."""
        with self._saying:
            if self._readings is None:
                self._awake.clear()

    def _loop(self) -> None:
        speed = use = 0.0
        while True:
            self._awake.wait()
            time.sleep(FLUSH_EVERY)
            if self._readings is not None:
                self._look(self._number)
                self._note_place()
            self._sleep_unless_a_cell_runs()
            self._outputs.drain()
            self._outputs.outlet.flush()
            with self._saying:
                readings, now = self._readings, time.monotonic()
                if readings is None:
                    continue
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


class Gauges:
    """A rank's use of memory, processor and GPU; read by the meters' thread alone."""

    def __init__(
        self,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._processor = processor
        self._machine: int | None = None
        self._private = self._written = 0
        self._due = 0.0
        self._on_card = False
        """a card was measured: a cell that has none asks for nothing"""
        self._peak = self._retries = 0
        """the card's, when the cell began"""
        self._silent = False
        """the driver does not tell the card's use"""
        self.begin()

    def begin(self) -> None:
        """Count from here on: the device counts since the process began."""
        self._before = self._clock(), self._processor()
        if self._on_card and (torch := _cuda()) is not None:
            self._peak, self._retries = torch.cuda.max_memory_allocated(), _retries(torch)

    def memory(self) -> Memory:
        torch = _cuda()
        process = self._process()
        if torch is None:
            if self._machine is None:
                self._machine = host.memory().limit
            return Memory(rank=self.rank, time=time.time(), process=process, limit=self._machine)
        self._on_card = True
        allocated, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return Memory(
            rank=self.rank,
            time=time.time(),
            process=process,
            allocated=allocated,
            reserved=torch.cuda.memory_reserved(),
            peak=most if most > self._peak else allocated,  # as much as before, and it may be an earlier cell's
            limit=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            retries=max(0, _retries(torch) - self._retries),
        )

    def _process(self) -> int:
        """The process's private memory: what the system had counted, and what has been written to since then."""
        now = self._clock()
        if now >= self._due:
            began = time.thread_time()
            self._private, self._written = host.private_memory(os.getpid()) or 0, _written()
            self._due = now + LIGHT * (time.thread_time() - began)
        return max(0, self._private + _written() - self._written)

    def use(self) -> Use:
        """Use since the last call."""
        now, processor = self._clock(), self._processor()
        since, used = self._before
        self._before = now, processor
        busy = (processor - used) / (now - since) if now > since else 0.0
        return Use(rank=self.rank, time=time.time(), processor=busy, card=self._card())

    def _card(self) -> float | None:
        torch = _cuda()
        if torch is None or self._silent:
            return None
        try:
            return float(torch.cuda.utilization()) / 100
        except Exception:  # without pynvml, or in a container that hides the driver's counters
            self._silent = True
            return None


def _written() -> int:
    """Bytes in memory that are in no file, those included that are shared with the process that this one is forked
    from; 0 where the system does not say at once."""
    try:
        with open("/proc/self/statm") as file:
            _, present, of_files, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (present - of_files) * mmap.PAGESIZE


def _retries(torch: Any) -> int:
    """How often the allocator has had to begin anew for want of memory."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _cuda() -> Any:
    """torch, where it has a card; a process that has not begun to use one is not made to."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


DEEP = 64
"""calls that are noted, the innermost first"""


class LastPlace:
    """The calls of the main thread, noted by another thread while a cell runs: a SIGKILL leaves no traceback. The file
    is the kernel's and is in memory, so it outlives the process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._main = threading.main_thread().ident
        self.noted = False

    def clear(self) -> None:
        """No cell runs: where the last one was is no longer true."""
        self.noted = False
        with suppress(OSError):
            os.ftruncate(self._fd, 0)

    def note(self) -> None:
        self.noted = True
        with frames_of(self._main) as frames:
            calls = [
                f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
                for frame in islice(frames, DEEP)
            ]
        # One write, as the process may end at any moment; what an earlier, longer note had comes behind the zero.
        with suppress(OSError):  # a full disk is no reason to stop what else this thread does
            os.pwrite(self._fd, "".join(calls).encode("utf-8", "replace") + b"\0", 0)
