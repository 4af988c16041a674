"""Deals whole batches of a loader out to the ranks, for predictions: each is what one process gives, and bringing them
together is taking one of each rank in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def has_share(loader: Any) -> bool:
    """Whether a sampler of the user's gives each rank a share of it."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, DistributedSampler) or isinstance(
        getattr(getattr(loader, "batch_sampler", None), "sampler", None), DistributedSampler
    )


def is_dealt(loader: Any) -> bool:
    """Whether its batches can be dealt out: not those of a stream."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def drawn_alike(batches: Iterable[Any]) -> list[Any]:
    """The indices of all batches, as rank 0 draws them: a sampler that shuffles would do so on each rank anew."""
    drawn = [list(batches) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(drawn)
    return drawn[0]


class WholeBatches:
    """Every `world_size`-th batch of a loader, with its number. Made on all ranks together.

    All ranks get as many, for those that hold a part of the weights need each other: where there is none left for a
    rank it gets the last one again, whose number is beyond `count`.
    """

    def __init__(self, loader: Any, limit: int) -> None:
        self.loader, self.limit = loader, limit
        self.count: int | None = None
        """of all batches; None: they are not dealt out, and each rank has all"""
        if dist.is_initialized() and dist.get_world_size() > 1 and is_dealt(loader) and not has_share(loader):
            every = drawn_alike(loader.batch_sampler)[:limit]
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self.count = len(every)
            self.first, self.step = rank, ranks
            rounds = range(rank, -(-self.count // ranks) * ranks, ranks)
            self.loader = _with_batches(loader, [every[min(number, self.count - 1)] for number in rounds])

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.count is None:
            yield from zip(range(self.limit), self.loader, strict=False)
            return
        for place, batch in enumerate(self.loader):
            yield self.first + place * self.step, batch

    def whole(self, mine: list[Any]) -> list[Any]:
        """What all ranks have made of their batches, in order, on rank 0; elsewhere this rank's own. Collective."""
        if self.count is None:
            return mine
        parts: list[Any] | None = [None] * self.step if dist.get_rank() == 0 else None
        dist.gather_object(mine, parts)
        return in_turn(parts)[: self.count] if parts is not None else mine


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """The first of each rank, the second of each, …"""
    return [parts[at % len(parts)][at // len(parts)] for at in range(sum(map(len, parts)))]


def _with_batches(loader: Any, batches: list[Any]) -> Any:
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return DataLoader(
        loader.dataset, batch_sampler=batches, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context, generator=loader.generator, **workers,
    )  # fmt: skip
