"""`reduce` and `gather` where several ranks see the same batches: one of them speaks for all.

Otherwise `reduce(correct, "sum") / len(dataset)` would count each sample as often as it is seen. A mean is over all
shares of the batches, whatever their ranks are; `min` and `max` are over all ranks. Where ranks that see the same have
something else to say, as of files that a loop has dealt out by rank, that is not silent: it is a warning.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Strategy
from nbtrain.training.ranks import collectives

FAR = 1e-3
"""relative; what is computed on several GPUs may differ by less"""


class Speakers:
    """The first rank of each share."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        shares = [strategy.share(i, world_size)[0] if not strategy.hands_off else i for i in range(world_size)]
        self.speaks_for = [shares.index(share) for share in shares]
        """rank → who speaks for it"""
        self.ranks = sorted(set(self.speaks_for))
        self.rank, self.world_size = rank, world_size
        self.silent = rank not in self.ranks
        self.several = len(self.ranks) < world_size
        self.weight = world_size / (len(self.ranks) * shares.count(shares[rank]))
        """in a mean over all ranks; 1 where all shares have as many"""
        self._said: set[str] = set()

    def names(self) -> dict[str, Any]:
        """What a cell is to use."""
        source = self if self.several else collectives
        return {"reduce": source.reduce, "gather": source.gather}

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """The ranks' values as one, on every rank: a number for a number, a new tensor for a tensor.

        `op` is mean, sum, min or max. `reduce(correct, "sum") / len(dataset)` is the accuracy over all ranks: in a sum
        one rank speaks for those that see the same batches, so that no sample is counted twice.
        """
        collectives.check(value, op)
        if op == "sum":
            mine = torch.zeros(self.world_size, dtype=torch.float64)
            mine[self.rank] = _sign(value)
            signs = collectives.reduce(mine, "sum").tolist()
            self._compare('reduce(value, "sum")', signs, "reduce(value) * world_size is the sum over all ranks")
            value = _nothing(value) if self.silent else value
        elif op == "mean" and self.weight != 1:
            value = value * self.weight
        return collectives.reduce(value, op)

    def gather(self, value: Any, sync_grads: bool = False) -> list[Any]:
        """The ranks' values, in order of rank, on every rank. Tensors may differ in shape; other values must pickle.

        Of ranks that see the same batches there is one value, the first one's: one speaks for all of them.
        `sync_grads`: it is part of a loss. Where all ranks see the same batches it may be as it is.
        """
        if sync_grads and isinstance(value, torch.Tensor) and value.requires_grad:
            if len(self.ranks) == 1:
                return [value]
            raise NotSupported(
                "gather(…, sync_grads=True) does not know how gradients are put together where several ranks "
                "see the same batches and others do not: use --strategy ddp, under which it works"
            )
        found = collectives.gather(value)
        signs = [_sign(one) if isinstance(one, int | float | torch.Tensor) else math.nan for one in found]
        self._compare("gather(value)", signs, "torch.distributed.all_gather_object gets the values of all ranks")
        return [found[rank] for rank in self.ranks]

    def _compare(self, what: str, signs: list[float], instead: str) -> None:
        for rank, speaker in enumerate(self.speaks_for):
            one, other = signs[speaker], signs[rank]
            if abs(one - other) > FAR * max(abs(one), abs(other)) and what not in self._said:
                self._said.add(what)
                warnings.warn(
                    f"{what}: ranks {speaker} and {rank} see the same batches, so rank {speaker} speaks for both, and "
                    f"rank {rank} has another value here, which is left out. {instead}",
                    stacklevel=3,
                )


def _nothing(value: Any) -> Any:
    """What adds nothing to a sum. Not `value * 0`, which of what is infinite is none."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 if isinstance(value, int) else 0.0


def _sign(value: Any) -> float:
    """By which two values can be told apart; nan, which is equal to all, where there is nothing to be told."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.layout is not torch.strided:
        return math.nan
    flat = value.detach().reshape(-1)
    flat = (flat.abs() if flat.is_complex() else flat).double()
    return float(flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)) + len(flat)
