"""Deals the batches of a loader out to the ranks. The loader itself is left untouched.

Any sampler keeps its meaning: it is asked for batches as in one process, and each rank takes its share. Nothing is
drawn ahead of a round (one batch per rank), so a sampler that reacts to the training sees at most `world_size - 1`
batches of delay, plus what the loader's own workers prefetch. Torch's own samplers draw random numbers before
their first batch only; for all others the shared random state is swapped in for every round, which costs 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import nbtrain.machine.registry as registry
from nbtrain.base.specs import RankInfo, RunSpec
from nbtrain.strategies.base import share_of
from nbtrain.worker.parts import Deal
from nbtrain.worker.random_states.rank_random_states import Randomness

COUNTS = ("num_replicas", "num_processes")
"""Samplers' names for the number of processes: torch's DistributedSampler, and accelerate's BatchSamplerShard."""
DRAW_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def batches_of_a_step(run: RunSpec, namespace: Mapping[str, Any]) -> int:
    """Batches of one process that all ranks of such a run take together, as its strategy shares them out. For the
    notebook, before there are ranks; `namespace`: the notebook's."""
    if not run.sampler or run.split_batches:
        return 1
    strategy, ranks = registry.make_strategy(run.strategy, run.options, namespace), run.pool.world_size
    strategy.place = RankInfo(
        rank=0, world_size=ranks, local_rank=0, device=run.pool.devices[0], threads=1, nodes=run.pool.nodes
    )
    return share_of(strategy, 0, ranks)[1]


def batch_notes(objects: Mapping[str, object], deal: Deal, accumulate: int, who: str) -> list[str]:
    """The effective batch, once per batch size: `batch 32 × 4 = 128`. `who`: what the batches are split over.

    A loop that evaluates sees its loader's batches as they are: of several loaders those that shuffle count."""
    notes: list[str] = []
    if not (loaders := [item for item in objects.values() if isinstance(item, DataLoader)]):
        return notes
    for loader in [other for other in loaders if not isinstance(other.sampler, SequentialSampler)] or loaders:
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int) or isinstance(size, bool):
            continue
        note = f"batch {size}"
        if deal.count > 1:
            note += f" split over {deal.count} {who}" if deal.split else f" × {deal.at_a_time}"
        if accumulate > 1:
            note += f" × {accumulate} accumulated"
        if (times := accumulate * deal.at_a_time) > 1:
            note += f" = {size * times}"
        if note not in notes and note != f"batch {size}":
            notes.append(note)
    sure = len(notes) == 1 and any(isinstance(item, Optimizer) for item in objects.values())
    return notes if sure else [f"{note} where it trains" for note in notes]


def dealt_out(loader: DataLoader[Any]) -> bool:
    """Whether this loader's batches can be dealt out: not those of iterable data, not single samples, and not those
    that depend on the rank already."""
    return (
        not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None and not shared_out(loader)
    )


def shared_out(loader: Any) -> bool:
    """Whether its own sampler deals batches out: torch's, accelerate's, or one written like them."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    counts = (getattr(sampler, name, 1) for sampler in samplers for name in COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def draws_by_itself(batches: Any) -> bool:
    """Whether a sampler may draw from random numbers that ranks do not share: its own, those of a generator."""
    parts = (batches, getattr(batches, "sampler", None))
    return any(
        part is not None
        and (not type(part).__module__.startswith("torch.") or getattr(part, "generator", None) is not None)
        for part in parts
    )


_END = object()


def following(inner: Iterator[Any], count: int | None = None) -> Iterator[Any]:
    """The next `count`, or all that follow. Asked for by `next` alone: an iterator should give itself to `iter`, and
    that with which Lightning predicts begins anew."""
    while count != 0 and (batch := next(inner, _END)) is not _END:
        yield batch
        count = None if count is None else count - 1


class Dealt:
    """One rank's share of a batch sampler's batches. Every rank gets as many batches, of equal sizes.

    A last round that is incomplete or uneven is pooled and dealt out evenly, filled up with at most `count - 1`
    samples of the first batches; a loader with `drop_last` drops it instead.
    """

    def __init__(
        self,
        batches: Any,
        deal: Deal,
        randomness: Randomness,
        *,
        drop_last: bool = False,
        padded: Callable[[int], None] = lambda samples: None,
        drawn: Callable[[Any], None] | None = None,
    ) -> None:
        """`drawn` is given what all ranks together were dealt, where a sampler has random numbers of its own."""
        self.drawn = drawn if deal.count > 1 and draws_by_itself(batches) else None
        self.batches = batches
        self.deal = deal
        self.randomness = randomness
        self.drop_last = bool(getattr(batches, "drop_last", drop_last))
        self.padded = padded

    def __len__(self) -> int:
        each, batches = self.deal.at_a_time, len(self.batches)
        return batches // each if self.drop_last and each > 1 else -(-batches // each)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: a sampler that draws when `iter` is called does so now, as in one process.
        with self.randomness.shared():
            inner = iter(self.batches)
        by_batch = self.deal.split or self.deal.count == 1
        return self._parts(inner, self.deal) if by_batch else self._rounds(inner, self.deal)

    def _draw(self, inner: Iterator[Any], count: int, first: bool) -> list[Any]:
        """Up to `count` batches."""
        quiet = not first and type(self.batches) is BatchSampler and type(self.batches.sampler) in DRAW_ONCE
        with nullcontext() if quiet else self.randomness.shared():
            got = list(following(inner, count))
        if self.drawn is not None:
            self.drawn(got)
        return got

    def _parts(self, inner: Iterator[Any], deal: Deal) -> Iterator[Any]:
        """Each batch in `count` parts of one size."""
        first = True
        while got := self._draw(inner, 1, first):
            first = False
            yield got[0] if deal.count == 1 else self._even(list(got[0]), list(got[0]), deal)

    def _rounds(self, inner: Iterator[Any], deal: Deal) -> Iterator[list[Any]]:
        """Every `count`-th batch."""
        start: list[Any] = []
        while got := [list(batch) for batch in self._draw(inner, deal.at_a_time, not start)]:
            start = start or [sample for batch in got for sample in batch]
            complete = len(got) == deal.at_a_time
            if complete and deal.at_a_time == deal.count and len(set(map(len, got))) == 1:
                yield [sample for batch in got for sample in batch] if deal.whole else got[deal.index]
            elif complete or not self.drop_last:
                yield self._even([sample for batch in got for sample in batch], start, deal)

    def _even(self, samples: list[Any], filling: list[Any], deal: Deal) -> list[Any]:
        short = -len(samples) % deal.count
        if short:
            self.padded(short)
            samples = samples + (filling * deal.count)[:short]
        return samples if deal.whole else samples[deal.index :: deal.count]


def has_indices(loader: Any) -> bool:
    """Whether its samples are drawn by a sampler: not those of a stream."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
