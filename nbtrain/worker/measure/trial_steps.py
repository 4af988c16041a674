"""Ends a trial's loop after a number of steps, and measures what they took.

Every rank counts the same steps, so that all end after the same one without communication.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

import nbtrain.machine.registry as registry
from nbtrain.base.events import Tried
from nbtrain.base.specs import RunSpec, Trial
from nbtrain.compat.loaders import end_workers
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.loop.stopping import TrialOver
from nbtrain.worker.measure.memory_peak import MemoryPeak
from nbtrain.worker.measure.step_record import StepRecord

ENDLESS = 10**9
SEEN = 2
"""Steps after which it is known what they take: the first makes the optimizer's state, the second has all at once."""


def make_trial_steps(spec: RunSpec, device: str) -> TrialSteps:
    """Prepare a trial's measurement. A library is loaded once for all models, so it is imported before, and not
    counted."""
    entry = registry.find_strategy(spec.strategy)
    for name in entry.needs.packages if entry is not None else ():
        if name not in sys.modules:
            with suppress(Exception):  # why it cannot be had is said where it is used
                import_module(name)
    assert spec.trial is not None
    return TrialSteps(spec.trial, torch.device(device))


class StepMark(NamedTuple):
    """Where a rank stood when a step had ended."""

    time: float
    samples: int
    batches: int


class TrialSteps:
    """Counts and times the steps of one trial on one rank."""

    def __init__(self, trial: Trial, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        """Made before the rank copies anything that the cell uses: memory is counted from here on."""
        gc.collect()
        self.trial = trial
        self.grown = trial.batch == 1.0
        """a loader's batch was made larger"""
        self.record: StepRecord | None = None
        """records what the steps saw and computed"""
        self._device = device
        self._clock = clock
        self._peak = MemoryPeak(device)
        self._marks: list[StepMark] = []
        self._steps: Steps | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, the rank has the memory and threads that the trial may have. What needs more memory raises, so that
        the machine's other processes live."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.trial.threads or threads)
        try:
            with self._peak.limited(self.trial.memory) if self.trial.memory else nullcontext():
                yield
        finally:
            self._peak.close()
            torch.set_num_threads(threads)

    def begin(self, steps: Steps) -> None:
        """The cell begins."""
        self._steps = steps
        if self.record is not None:
            self.record.begin()
        self._peak.begin()
        self._mark()

    def regrouped(self, batches: Any) -> Any:
        """Return a loader's batch sampler, with larger batches."""
        self.grown = True
        return Regrouped(batches, self.trial.batch)

    def ended(self) -> bool:
        """Note that a step has ended; True if it is the last."""
        self._mark()
        return len(self._marks) > self.trial.warm + self.trial.steps

    def well(self, failure: BaseException | None) -> bool:
        """Whether the cell has ended by itself, or because the trial is over."""
        return failure is None or isinstance(failure, TrialOver)

    def release_loaders(self) -> None:
        """End the workers of loaders that were cut short, now and not while somebody waits for it."""
        assert self._steps is not None
        for iterator in self._steps.opened_iterators():
            end_workers(iterator)

    def told(self, rank: int) -> Tried:
        """The result, when the cell is over, however it ended."""
        assert self._steps is not None
        marks = self._marks
        # A loop that was shorter is timed for what it had; its first step, in which all is made, only if it is alone.
        first = min(self.trial.warm, max(0, len(marks) - 2))
        since, until = marks[first], marks[-1]
        samples, batches = until.samples - since.samples, until.batches - since.batches
        return Tried(
            rank=rank,
            time=time.time(),
            memory=self._peak.bytes(),
            steps=len(marks) - 1 - first,
            seconds=until.time - since.time,
            median=median([b.time - a.time for a, b in pairwise(marks[first:])] or [0.0]),
            samples=round(samples * self._steps.part),
            batch=round(samples / batches) if batches else 0,
            grown=self.grown,
        )

    def _mark(self) -> None:
        assert self._steps is not None
        if len(self._marks) in (self.trial.warm, self.trial.warm + self.trial.steps):
            self._peak.wait()
        self._peak.look()
        if len(self._marks) > self.trial.warm + self.trial.steps:
            return  # the cell has caught what was to end it, and goes on
        if len(self._marks) == SEEN:
            self._peak.close()
        self._marks.append(StepMark(self._clock(), self._steps.samples, self._steps.batches))


class Regrouped:
    """A batch sampler's samples in batches of another size, as many of them as before; where the samples do not
    suffice, they come again."""

    def __init__(self, batches: Any, factor: float) -> None:
        self.batches = batches
        self.factor = factor

    def __len__(self) -> int:
        try:
            return len(self.batches)
        except TypeError:  # a sampler that does not say: the trial ends the loop
            return ENDLESS

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self.batches)
        samples = list(next(source, ()))
        size = max(1, round(len(samples) * self.factor))
        most = len(self) if samples else 0
        for _ in range(most):
            while len(samples) < size:
                batch = next(source, None)
                if batch is None:
                    source = iter(self.batches)
                    batch = next(source)
                samples += batch
            yield samples[:size]
            del samples[:size]
