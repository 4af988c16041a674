"""Which batches a rank gets of the loaders that Lightning iterates.

To train, nbtrain deals them out as in every cell. Evaluations see all of them on every rank, so that a metric is that
of one process. Predictions are dealt out by whole batches: each is what one process gives, and bringing them together
is taking one of each rank in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from nbtrain.annexes.frameworks.lightning.progress import runtime_here
from nbtrain.compat import lightning
from nbtrain.worker.data.batch_dealing import dealt_out
from nbtrain.worker.data.whole_batches import Share

MAY_BE_EMPTY = "allow_zero_length_dataloader_with_multiple_devices"
"""Lightning's own name for it, in a module"""


class Evaluated:
    """A loader of an evaluation. Lightning asks for its length before anything tells that it evaluates."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Dealing:
    """While a Trainer predicts on several ranks; for its other functions this does nothing."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.strategy = trainer, trainer.strategy
        deal = runtime_here().loaders.deal
        self.mine = deal.index, deal.count
        """which share of the batches this rank has, and of how many: several ranks may have the same"""
        self.on = bool(trainer.predicting) and deal.count > 1
        self.limit = trainer.limit_predict_batches
        self._dealt: list[Share | None] = []
        """for each loader; None: its batches were not dealt out"""

    def __enter__(self) -> Dealing:
        if self.on:
            self.strategy.dealing = self
            module = self.trainer.lightning_module
            self._may_be_empty = getattr(module, MAY_BE_EMPTY)
            setattr(module, MAY_BE_EMPTY, True)  # of fewer batches than ranks
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            self.strategy.dealing = None
            setattr(self.trainer.lightning_module, MAY_BE_EMPTY, self._may_be_empty)
            self.trainer.limit_predict_batches = self.limit

    def deal(self, loader: Any) -> None:
        """Deal out the batches of a loader. A stream, or a sampler that does so by itself, stays as it is."""
        share = None
        if isinstance(loader, DataLoader) and dealt_out(loader):
            drawing = runtime_here().randomness.shared()
            share = lightning.replace_batches(loader, lambda batches: Share(batches, self.limit, self.mine, drawing))
        self._dealt.append(share)
        # A share knows the limit for all ranks together.
        self.trainer.limit_predict_batches = 1.0 if share is not None and self.limit != 0 else self.limit

    def whole(self, result: Any) -> Any:
        """What all ranks have predicted, in order, on rank 0; a loader that was not dealt out is rank 0's alone."""
        if not self.on or {*self._dealt} == {None} or self.trainer.predict_loop.return_predictions is False:
            return result
        mine = [result or []] if len(self._dealt) == 1 else result or [[] for _ in self._dealt]
        every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self.mine[0], mine), every)
        if every is None:
            return None
        of_share = dict(reversed(every))  # the first rank's of each
        parts = [of_share[index] for index in range(self.mine[1])]
        merged = [
            share.merged([part[at] for part in parts]) if share is not None else parts[0][at]
            for at, share in enumerate(self._dealt)
        ]
        return merged[0] if len(merged) == 1 else merged
