"""Counts what a rank has done: optimizer steps, samples, epochs, where it stands in its loader.

Steps are those of the optimizer that stepped most often: a GAN's two optimizers, each stepping once per batch, make
one step per batch. What `--accumulate` leaves out is no step. All numbers may be read from other threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.utils.data import DataLoader

from nbtrain.base.events import VALIDATION, Progress, Throughput
from nbtrain.compat.loaders import handed_out
from nbtrain.worker.parts import Cell, Part


class OptimizerRound:
    """Optimizers that take turns, like a GAN's two. Without a loader a step is over when each of them has stepped;
    which they are shows when the first of them steps again."""

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        """`optimizers`: the cell's, the same on all ranks."""
        self._all: WeakSet[Any] = WeakSet(optimizers)
        self._since: WeakSet[Any] = WeakSet()

    def stepped(self, optimizer: Any) -> None:
        if optimizer in self._since:
            self._all, self._since = self._since, WeakSet()
        self._since.add(optimizer)

    def has(self, optimizer: Any) -> bool:
        """Whether it has stepped in this round."""
        return optimizer in self._since

    @property
    def complete(self) -> bool:
        return bool(self._all) and self._all <= self._since


@dataclass(frozen=True, slots=True)
class Stage:
    """What a Trainer says of a loader's iteration: of a plain loop only the loader's own count is known."""

    epoch: int
    epochs: int | None = None
    name: str = ""
    """validation, test, predict; empty: training"""
    most: int | None = None
    """batches that are used of it"""


@dataclass(frozen=True, slots=True)
class Iteration:
    """A loader under way, or one that has ended."""

    iterator: ref[Any]
    epoch: int
    total: int | None
    stage: Stage | None
    epochs: int | None = None
    """of the loop around it"""
    evaluates: bool = False
    """of a plain loop: it does not train"""

    def progress(self, rank: int, done: int) -> Progress:
        now = time.time()
        progress = Progress(rank=rank, time=now, done=done, total=self.total, epoch=self.epoch, epochs=self.epochs)
        if (stage := self.stage) is None:
            return replace(progress, stage=VALIDATION) if self.evaluates else progress
        total = min((count for count in (self.total, stage.most) if count is not None), default=None)
        return replace(progress, total=total, epoch=stage.epoch, epochs=stage.epochs, stage=stage.name)


class Steps(Part):
    """The counters of one rank; `begin` sets them to zero.

    `ended` is called where a step has ended, `between` where none is under way: both may raise, for there a cell can
    be interrupted without leaving half a step behind.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended: Callable[[], None] = lambda: None
        self.between: Callable[[], None] = lambda: None
        self.noted: Callable[[], None] = lambda: None
        """called after each step of an optimizer"""
        self.total = 0
        """calls of `step`, of all cells and optimizers"""
        self.begin()

    def begin(self, cell: Cell | None = None) -> None:
        self.round = OptimizerRound(
            cell.optimizers if cell is not None else ()
        )  # what is left of an earlier cell's may differ from rank to rank
        self.began = time.monotonic()
        self.count = 0
        self.samples = 0
        # Where batches are not shared out each rank has samples of its own.
        dealt = cell is not None and cell.managed and cell.run.sampler
        self.part = cell.count / cell.world_size if cell is not None and dealt else 1.0
        """of each sample, what this rank counts: several ranks may see one together"""
        self.batch = 0
        """samples of the last batch"""
        self.batches = 0
        self.calls = 0
        """calls of `step`, of all optimizers"""
        self.ends = 0
        """steps that have ended"""
        self.skipped = 0
        """steps that a scaler left out"""
        self.armed = False
        """an optimizer has stepped, or was passed over by a scaler, since the last end"""
        self.under_way = False
        """a backward has run since then"""
        self.taken: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.begun: WeakKeyDictionary[Any, tuple[DataLoader[Any], Iteration]] | None = None
        """iterators of which no batch was asked for; made when there is one"""
        self.iterators: list[Iteration] = []
        """loaders under way, the one used last at the end"""
        self.finished: Iteration | None = None
        self.stage_of: Callable[[Any], Stage] | None = None
        """a Trainer's: of a loader whose iteration begins"""

    def begun_before(self, loader: DataLoader[Any]) -> int:
        """Its iterations so far."""
        return self.epochs.get(loader, -1) + 1

    def opened(
        self, iterator: Any, loader: DataLoader[Any], within: tuple[int, int] | None = None, evaluates: bool = False
    ) -> None:
        """A loader's iteration begins. `within`: the epoch, and of how many, as the loop around says; `evaluates`: it
        does not train."""
        if not _in_main_thread():  # it runs ahead of the training, by as much as it likes
            return
        epoch, epochs = within or (self.begun_before(loader), None)
        try:
            total: int | None = len(iterator)
        except (TypeError, NotImplementedError):
            total = None
        stage = self.stage_of(loader) if self.stage_of is not None else None
        self.begun = WeakKeyDictionary() if self.begun is None else self.begun
        self.begun[iterator] = loader, Iteration(ref(iterator), epoch, total, stage, epochs, evaluates)

    def asked(self, iterator: Any) -> None:
        """The loop asks for the next batch: between two steps."""
        self.at_boundary()
        if self.begun is not None and iterator in self.begun:
            self._begin(iterator, *self.begun.pop(iterator))
            self.begun = self.begun or None
        # Another loader was used last: the loop over that one has ended.
        if self.iterators and self.iterators[-1].iterator() is not iterator and (place := self._remove(iterator)):
            self.iterators.append(place)

    def _begin(self, iterator: Any, loader: DataLoader[Any], place: Iteration) -> None:
        """The first batch is asked for. Not before that: tqdm.auto has two iterators made, and uses one."""
        epoch = self.epochs[loader] = self.begun_before(loader)
        self._remove(iterator)
        self.iterators.append(place if place.epochs is not None else replace(place, epoch=epoch))

    def backward(self) -> None:
        """A backward begins."""
        if not self.loading and (self.round.complete or not self.armed):
            self.at_boundary()
        self.under_way = True

    def at_boundary(self) -> None:
        if not _in_main_thread():  # nobody would hear of what is raised here, and the main thread stands anywhere
            return
        if self.armed:
            self.armed = self.under_way = False
            self.ends += 1
            self.ended()
        elif not self.under_way:
            self.between()

    def got(self, samples: int) -> None:
        self.batches += 1
        self.samples += samples
        self.batch = samples

    def exhausted(self, iterator: Any) -> None:
        if (place := self._remove(iterator)) is None or place.total is None:
            return
        if place.stage is not None and place.stage.name == VALIDATION:  # what that is within has its own place
            return
        trained = self.finished is not None and not self.finished.evaluates
        if not (place.evaluates and trained):
            self.finished = place

    def stepped(self, optimizer: Any) -> None:
        """A real step has been taken."""
        taken = self.taken.get(optimizer, 0) + 1
        self.taken[optimizer] = taken
        self.count = max(self.count, taken)
        self.total += 1
        self.calls += 1
        self.round.stepped(optimizer)
        self.armed = True
        self.noted()

    def passed_over(self, optimizer: Any) -> None:
        """A scaler found infinite gradients: it has not stepped, but its turn is over."""
        self.round.stepped(optimizer)
        self.skipped += 1
        self.armed = True

    @property
    def loading(self) -> bool:
        """Whether a loader is being iterated."""
        return self._latest() is not None

    def opened_iterators(self) -> list[Any]:
        """Of loaders, that have not ended; those of which no batch was asked for are among them."""
        used = [alive for iteration in self.iterators if (alive := iteration.iterator()) is not None]
        return [*used, *(self.begun or ())]

    @property
    def at_last_batch(self) -> bool:
        """Whether the batch being worked on is the last of its loader."""
        latest = self._latest()
        return latest is not None and handed_out(latest[0]) == latest[1].total

    def place(self) -> tuple[int, int, int, int]:
        """(batches handed out, length, epoch, `order`) of the loader used last; zeros for what is not known."""
        if (latest := self._latest()) is None:
            return 0, 0, 0, 0
        iterator, under_way = latest
        return handed_out(iterator), under_way.total or 0, under_way.epoch, getattr(iterator, "nbtrain_order", 0)

    def progress(self) -> Progress | None:
        if (latest := self._latest()) is not None:
            iterator, under_way = latest
            return under_way.progress(self.rank, handed_out(iterator))
        if (finished := self.finished) is not None:
            progress = finished.progress(self.rank, 0)
            return replace(progress, done=progress.total or 0)
        return None

    def throughput(self) -> Throughput:
        seconds, samples = time.monotonic() - self.began, self.samples * self.part
        return Throughput(rank=self.rank, time=time.time(), steps=self.count, samples=samples, seconds=seconds)

    def _latest(self) -> tuple[Any, Iteration] | None:
        """The loader used last that is still alive."""
        for under_way in reversed(self.iterators[:]):
            if (alive := under_way.iterator()) is not None:
                return alive, under_way
        return None

    def _remove(self, iterator: Any) -> Iteration | None:
        if not _in_main_thread():
            return None
        iteration = None
        kept = []
        for place in self.iterators:
            alive = place.iterator()
            if alive is iterator:
                iteration = place
            elif alive is not None:
                kept.append(place)
        self.iterators = kept
        return iteration


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
