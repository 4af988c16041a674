"""Deals out, moves and counts the batches of DataLoaders on a rank. No loader is changed."""

from __future__ import annotations

import multiprocessing
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.compat import loaders as iterators
from nbtrain.compat.intercept import Listeners
from nbtrain.worker.batches import contents, move, samples_in
from nbtrain.worker.data import split_datasets
from nbtrain.worker.data.batch_dealing import Dealt, batch_notes, dealt_out, has_indices
from nbtrain.worker.data.evaluations import Evaluations
from nbtrain.worker.data.loop_position import LoopPositions, epoch_around
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.measure.phases import DATA, FORWARD, UNDECIDED, PhaseTimer
from nbtrain.worker.parts import Cell, Deal, Part
from nbtrain.worker.random_states.rank_random_states import Randomness, derive

if TYPE_CHECKING:
    from nbtrain.worker.data.stream_dealing import StreamShare
    from nbtrain.worker.measure.step_record import StepRecord

WHOLE = Deal(index=0, count=1)
"""Every rank sees all batches: it evaluates."""


class Loaders(Part):
    """Every loader that the rank iterates while a cell runs."""

    def __init__(
        self,
        randomness: Randomness,
        steps: Steps,
        phases: PhaseTimer,
        device: torch.device,
        rank: int,
        positions: LoopPositions,
        models: Callable[[], Iterable[torch.nn.Module]],
    ) -> None:
        """`models`: the cell's."""
        self.randomness = randomness
        self.steps = steps
        self.phases = phases
        self.device = device
        self.rank = rank
        self.running = False
        self.hands_off = False
        self.deal = Deal(index=0, count=1)
        self.padded = 0
        self.unshared: set[str] = set()
        self.gave_shares = False
        """a loader was shared out to train"""
        self.data: int | None = 0
        """a fingerprint of the data sets that the cell shares out, the same on all ranks; None: one cannot be read"""
        self.stream = 0
        """a number for the first batch of a stream that looks which rank it is on, and is left to split itself"""
        self.drawn = 0
        """a number for all that samplers with random numbers of their own have drawn"""
        self.known: WeakSet[Any] = WeakSet()
        self.on_own_batches: Callable[[], None] = lambda: None
        """called when a loader begins that gives ranks different batches"""
        self.positions = positions
        self.evaluations = Evaluations(models)
        self._streamed: dict[Any, bool] = {}
        """loaders of streams that the cell has used → whether they are dealt out"""
        self._streams = False
        """it is of a stream, of which every rank has to see the same"""
        self._opening: bool | None = None
        """whether the iteration that begins sees all batches; None: none begins"""
        self.regroup: Callable[[Any], Any] | None = None
        """batch sampler → one with batches of another size"""
        self.record: StepRecord | None = None
        """records the batches of a trial"""

    def listen(self, listeners: Listeners) -> None:
        listeners.listen(iterators.BATCHES, "loaders", self._index_sampler)
        listeners.listen("torch.utils.data.DataLoader.__iter__", "loaders", self._iter)
        listeners.listen("torch.utils.data.DataLoader.__len__", "loaders", self._len)
        listeners.listen(f"{iterators.ITERATOR}.__init__", "loaders", self._iterator_init)
        listeners.listen(f"{iterators.ITERATOR}.__next__", "loaders", self._next)
        listeners.listen("torch.utils.data.dataset.randperm", "loaders", self._split)

    def begin(self, cell: Cell) -> list[str]:
        self.running, self.deal, self.hands_off = True, cell.deal, cell.hands_off
        deal, shares = cell.deal, self._shares
        self.positions.deal, self.positions.shares, self.positions.patched = deal, shares, not cell.hands_off
        self.evaluations.begin(deal.count if shares else 1, cell.run.share_eval)
        self.record = cell.record
        self.regroup = cell.trial.regrouped if cell.trial is not None and cell.trial.trial.batch != 1.0 else None
        if self.record is not None:
            self.record.share = deal.index
        self._opening = None
        self.padded = self.data = self.stream = self.drawn = 0
        self.gave_shares = False
        self.known.clear()
        self.unshared.clear()
        who = "ranks" if cell.count == cell.world_size else "groups of ranks"
        return [] if cell.hands_off else batch_notes(cell.objects, deal, cell.run.accumulate, who)

    def end(self, ok: bool) -> list[str]:
        """Returns sentences about what the cell's loaders did."""
        self.running, self._streamed = False, {}
        self.regroup = self.record = None
        notes = self.evaluations.notes()
        if self.padded:
            count = "1 sample was" if self.padded == 1 else f"{self.padded} samples were"
            notes.append(
                f"{count} repeated to even out the last batches; DataLoader(..., drop_last=True) leaves them out"
            )
        if "single" in self.unshared and self.deal.count > 1:
            notes.append("a loader with batch_size=None is left alone: every rank sees all of its samples")
        return notes

    def compared(self) -> dict[str, int]:
        every = (("data", self.data), ("stream", self.stream), ("drawn", self.drawn))
        return {name: number for name, number in every if number}

    @property
    def _active(self) -> bool:
        return self.running and not self.hands_off

    @property
    def _shares(self) -> bool:
        """Whether loaders must keep in step with those of other ranks."""
        return self._active and (not self.randomness.alone or self.deal.whole)

    def _index_sampler(self, old: property) -> property:
        def sampler(loader: DataLoader[Any]) -> Any:
            # a property of torch's that can be read
            theirs = self.positions.skipping(old.fget(loader))  # type: ignore[misc]
            if self.regroup is not None and loader.batch_sampler is not None and self._active:
                theirs = self.regroup(theirs)
            if self._shares and dealt_out(loader):
                # Without an iteration that begins somebody asks for its length.
                every_batch = self._opening if self._opening is not None else self.evaluations.length(loader)
                deal = WHOLE if every_batch else self.deal
                theirs = Dealt(
                    theirs, deal, self.randomness, drop_last=loader.drop_last, padded=self._pad, drawn=self._drew
                )
            if self._opening is not None and self.evaluations.evaluating and has_indices(loader):
                theirs = self.evaluations.orders.noting(loader, theirs)
            return theirs if self.record is None else self.record.drawing(loader, theirs)

        return property(sampler)

    def _seen(self, loader: DataLoader[Any]) -> None:
        """Fingerprint its data, the first time in a cell."""
        if loader not in self.known:
            self.known.add(loader)
            if self.data is not None:
                try:
                    self.data = zlib.crc32(b"%d" % split_datasets.number(loader.dataset), self.data)
                except Exception:  # what the data set holds is of a class of its own; a hint breaks no cell
                    self.data = None

    def _drew(self, batches: Any) -> None:
        self.drawn = zlib.crc32(repr(batches).encode(), self.drawn)

    def _pad(self, samples: int) -> None:
        self.padded += samples

    def _iter(self, old: Any) -> Any:
        def iterate(loader: DataLoader[Any]) -> Any:
            if not self.running:
                return old(loader)
            before = self.phases.mark(DATA)  # its workers may be started
            try:
                return following(loader)
            finally:
                self.phases.resume(before)

        def following(loader: DataLoader[Any]) -> Any:
            if self.hands_off:  # it is only counted, and the samples of predictions are noted
                self.evaluations.evaluating = self.evaluations.always
                with self._open(False, False):
                    iterator = old(loader)
                around = epoch_around(self.steps.begun_before(loader))
                self.steps.opened(iterator, loader, around, not torch.is_grad_enabled())
                return iterator
            single = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is None
            if single and not self.evaluations.always:
                self.unshared.add("single")
            stream = self._shares and self._is_dealt_stream(loader)
            dealt = stream or (self._shares and dealt_out(loader))
            order = self.randomness.fingerprint() if dealt else 0
            self.evaluations.evaluating = False
            every_batch = (dealt or self.randomness.alone) and self.evaluations.opens(loader)
            left_alone = self._shares and self.deal.count > 1 and not (dealt or every_batch)
            if not every_batch and self.deal.count > 1:
                self.on_own_batches()
                if dealt:
                    self.gave_shares = True
                    if not stream:
                        self._seen(loader)
            with _forked_workers(loader), self._open(every_batch, stream):
                if (kept := iterators.running(loader)) is not None:
                    iterators.take_batches_anew(loader, kept)
                # The place of an evaluation is nowhere to go on from.
                iterator = old(loader) if self.evaluations.always else self.positions.open(loader, old)
            iterator.nbtrain_left_alone = left_alone and isinstance(loader.dataset, IterableDataset)
            iterator.nbtrain_share = self._share_of(loader, every_batch) if stream else None
            iterator.nbtrain_order = order  # from which numbers it draws its own: equal on all ranks
            if self.record is not None:
                self.record.opened(iterator, loader, dealt, every_batch)
            around = epoch_around(self.steps.begun_before(loader))
            evaluates = self.evaluations.evaluating or not torch.is_grad_enabled()
            self.steps.opened(iterator, loader, around, evaluates)
            if every_batch:
                self.evaluations.opened(iterator)
            return iterator

        return iterate

    def _is_dealt_stream(self, loader: DataLoader[Any]) -> bool:
        """Looked up once for a loader in a cell: loops ask for its length with each batch."""
        if not isinstance(loader.dataset, IterableDataset):
            return False
        if loader not in self._streamed:
            from nbtrain.worker.data.stream_dealing import dealt_as_stream

            self._streamed[loader] = dealt_as_stream(loader)
        return self._streamed[loader]

    def _share_of(self, loader: DataLoader[Any], every_batch: bool) -> StreamShare:
        from nbtrain.worker.data.stream_dealing import StreamShare

        deal, batched = WHOLE if every_batch else self.deal, loader.batch_size is not None
        # Workers draw from seeds of their own, which are the same on all ranks.
        drawing = nullcontext if loader.num_workers else self.randomness.shared
        return StreamShare(deal, drawing, self._pad, self._began, drop_last=loader.drop_last, batched=batched)

    def _began(self, batches: list[Any]) -> None:
        """A stream has given its first round, which is the same on all ranks unless somebody has split it already."""
        if self.data is not None:
            self.data = zlib.crc32("".join(contents(batches)).encode(), self.data) or 1

    @contextmanager
    def _open(self, every_batch: bool, stream: bool) -> Iterator[None]:
        """An iteration begins; it may begin within another one's."""
        before = self._opening, self._streams
        self._opening, self._streams = every_batch, stream
        self.positions.deal = WHOLE if every_batch else self.deal
        try:
            yield
        finally:
            (self._opening, self._streams), self.positions.deal = before, self.deal

    def _len(self, old: Any) -> Any:
        """Of a stream that says how long it is: of this rank's share, where the loop that asks trains."""

        def length(loader: DataLoader[Any]) -> int:
            found: int = old(loader)
            if not (self._shares and self._is_dealt_stream(loader)):
                return found
            every_batch = self._opening if self._opening is not None else self.evaluations.length(loader)
            count = 1 if every_batch or self.deal.split or self.deal.whole else self.deal.count
            return found // count if loader.drop_last else -(-found // count)

        return length

    def _split(self, old: Any) -> Any:
        """For `random_split`: drawn from states of their own, ranks would train on what others validate with."""

        def randperm(*args: Any, **kwargs: Any) -> Any:
            if not self._shares or kwargs.get("generator") not in (None, torch.default_generator):
                return old(*args, **kwargs)
            with self.randomness.shared():
                return old(*args, **kwargs)

        return randperm

    def _iterator_init(self, old: Any) -> Any:
        def init(iterator: Any, loader: DataLoader[Any]) -> Any:
            if not self._shares:
                return old(iterator, loader)
            # The draw of the base seed is part of the order of draws in one process; the seed itself, from which
            # loader workers augment, must differ from rank to rank.
            with self.randomness.shared():
                old(iterator, loader)
            if self.rank and not self._opening and not self._streams:
                iterators.set_base_seed(iterator, derive(iterators.base_seed(iterator), self.rank))

        return init

    def _next(self, old: Any) -> Any:
        def following(iterator: Any) -> Any:
            if not self.running:
                return old(iterator)
            self.steps.asked(iterator)
            before = self.phases.mark(DATA)
            after = UNDECIDED
            try:
                batch = self._batch(old, iterator)
                after = FORWARD
                return batch
            finally:
                if before == DATA:  # one loader draws from another
                    self.phases.resume(DATA)
                else:
                    self.phases.mark(after)

        return following

    def _batch(self, old: Any, iterator: Any) -> Any:
        if not self.hands_off:
            self.randomness.apart()
        try:
            share = getattr(iterator, "nbtrain_share", None)
            take = old if share is None else lambda inner: share.next(partial(old, inner))
            batch = take(iterator) if self.record is None else self.record.next_batch(take, iterator)
        except StopIteration:
            self.steps.exhausted(iterator)
            self.positions.exhausted(iterator)
            self.evaluations.exhausted(iterator)
            raise
        if getattr(iterator, "nbtrain_left_alone", False):
            iterator.nbtrain_left_alone = False
            self.stream = self.stream or zlib.crc32("".join(contents(batch)).encode()) or 1
        self.steps.got(samples_in(batch))
        return batch if self.hands_off or self.device.type == "cpu" else move(batch, self.device)


@contextmanager
def _forked_workers(loader: DataLoader[Any]) -> Iterator[None]:
    """Fork loader workers, which need the notebook's classes, also from Python 3.14 on."""
    if (
        sys.version_info < (3, 14)
        or not loader.num_workers
        or loader.multiprocessing_context is not None
        or "fork" not in multiprocessing.get_all_start_methods()
    ):
        yield
        return
    loader.multiprocessing_context = "fork"
    try:
        yield
    finally:
        loader.multiprocessing_context = None
