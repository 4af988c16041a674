"""Deals whole batches of a loader out to the ranks, for predictions: each is what one process gives, and bringing them
together is taking one of each rank in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nbtrain.worker.data.batch_dealing import has_indices, shared_out


class Share:
    """Every `count`-th of all batches, as indices: those of this rank. Made on all ranks together.

    All ranks get as many, for those that hold a part of the weights need each other: where there is none left for a
    rank it gets the last one again, with a number beyond `total`.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        limit: int | float | None,
        mine: tuple[int, int] | None = None,
        drawing: AbstractContextManager[Any] | None = None,
        opening: Callable[[], object] = lambda: None,
    ) -> None:
        """`mine`: (index, count) of this rank's share, where several ranks have the same. `drawing`: in which a
        sampler draws what one process would. `opening`: what a loader draws between asking its sampler and taking
        the first batch of it."""
        index, count = mine or (dist.get_rank(), dist.get_world_size())
        with drawing if drawing is not None else nullcontext():
            asked = iter(batches)
            opening()
            drawn = [list(asked)]
        dist.broadcast_object_list(drawn)  # a sampler with a generator of its own would shuffle on each rank anew
        self.every = drawn[0][: int(len(drawn[0]) * limit) if isinstance(limit, float) else limit]
        """the batches of all ranks"""
        self.index, self.count, self.total = index, count, len(self.every)
        self.numbers = range(index, -(-self.total // count) * count, count)
        self.mine = [self.every[min(number, self.total - 1)] for number in self.numbers]

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mine)

    def merged(self, parts: list[list[Any]]) -> list[Any]:
        """What was made of each share, in the order of all: the first of each, the second of each, …"""
        merged = [parts[at % len(parts)][at // len(parts)] for at in range(sum(map(len, parts)))]
        return merged[: self.total]


class WholeBatches:
    """The batches of a loader that this rank predicts, with their numbers: all, if they cannot be dealt out."""

    def __init__(
        self, loader: Any, limit: int, mine: tuple[int, int], drawing: AbstractContextManager[Any] | None = None
    ) -> None:
        """`mine`: (index, count) of this rank's share of the batches. `drawing`: see `Share`."""
        self.loader, self.limit = loader, limit
        self.share: Share | None = None
        if mine[1] > 1 and has_indices(loader) and not shared_out(loader):
            # A loader with batch_size=None gives one sample at a time.
            batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
            self._seed = 0
            self.share = Share(batches, limit, mine, drawing, self._draw_seed)
            self.loader = _with_batches(loader, self.share.mine, torch.Generator().manual_seed(self._seed + mine[0]))

    def _draw_seed(self) -> None:
        """That of the loader's workers, which every iteration draws, also without workers."""
        self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator).item()) >> 1

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        # The loader's iteration begins now, not with the first batch.
        return zip(range(self.limit) if self.share is None else self.share.numbers, self.loader, strict=False)

    def whole(self, mine: list[Any]) -> list[Any]:
        """What all ranks have made of their batches, in order, on rank 0; elsewhere this rank's own. Collective."""
        if self.share is None:
            return mine
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self.share.index, mine), parts)
        if parts is None:
            return mine
        of_share = dict(reversed(parts))  # the first rank's of each
        return self.share.merged([of_share[index] for index in range(self.share.count)])

    def samples(self, drawn: Any) -> torch.Tensor | None:
        """The index of each sample, in the order of the whole; None where samples have none. `drawn`: the indices that
        the loader has noted itself, if it was not dealt out."""
        if self.share is not None:
            batched = self.loader.batch_sampler is not None
            drawn = [at for batch in self.share.every for at in batch] if batched else self.share.every
        try:
            return None if drawn is None else torch.tensor(list(drawn), dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):  # a sampler of keys
            return None


def _with_batches(loader: Any, batches: list[Any], generator: torch.Generator) -> Any:
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    given = {"batch_sampler": batches} if loader.batch_sampler is not None else {"sampler": batches, "batch_size": None}
    return DataLoader(
        loader.dataset, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context, generator=generator, **given, **workers,
    )  # fmt: skip
