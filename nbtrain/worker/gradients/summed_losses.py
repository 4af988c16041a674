"""Finds losses whose mean over the ranks is not the loss of one process, where ranks average gradients.

The mean of the ranks' *sums* over a batch is one N-th of what one process has with the whole batch; backwards of single
samples are such a sum, too, if each is divided by the size of the batch that the ranks share, or by nothing. And where
each rank divides by a number of its own (targets that are ignored, class weights, a mask, a mean over some of the
samples), the mean of these means is not the mean of all. Both are read from the graphs of losses, so they are found
wherever they stand. The first is known to a rank from a cell's first losses; the second, when the ranks' numbers are
compared as the cell ends (session/report/cell_report.py). It may turn up late, so these are taken from the first four
backwards and from the eighth, sixteenth, thirty-second … of a cell.
"""

from __future__ import annotations

import zlib
from math import isclose
from typing import Any

import torch

from nbtrain.compat import autograd_engine

FIRST, NODES, DIVISORS = 4, 32, 8
"""backwards of a cell that are all looked at, nodes of each, and numbers of each that are compared"""
ALIKE, TERMS = 3, 8
"""backwards of one batch, and terms of one loss, from which on each is taken for one sample's"""
MEAN, SUM = 1, 2
NOTE = (
    "the loss is a sum over the samples of a batch, and gradients are averaged over the ranks: a step is that of one "
    'process with 1/{count} of its gradient. Write (loss * world_size).backward(), or reduction="mean"'
)


class SummedLosses:
    """Looks at the first losses of a cell on a rank. `begin` before each cell."""

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, count: int, split: bool = False) -> None:
        """`count`: ranks, or groups of ranks, to which batches are dealt out. `split`: each gets a part of one, whose
        size is the number by which a sum may be divided."""
        self.count, self.split, self.found = count, split, False
        self.on = count > 1
        self.backwards = 0
        self._batch: int | None = None
        self._alike = 0
        self._divisors: dict[str, tuple[float, float]] = {}

    def due(self) -> bool:
        """A backward begins: whether it is one to `look` at. The ranks have to look at the same ones."""
        self.backwards += self.on
        return self.on and (self.backwards <= FIRST or not self.backwards & (self.backwards - 1))

    def look(
        self, losses: Any, samples: int, shapes: set[torch.Size], weights: Any = None, batch: int | None = None
    ) -> None:
        """A backward begins. `samples`: of this rank's last batch. `shapes`: of weights, a sum over which is meant.
        `weights`: what the backward starts from. `batch`: which one it is; None: another one each time.
        A hint breaks no cell: where a look fails, there is none."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        try:
            self._look(losses, samples, shapes, weights, batch)
        except Exception:  # of a class of tensors of its own
            self.begin(1)

    def _look(self, losses: Any, samples: int, shapes: set[torch.Size], weights: Any, batch: int | None) -> None:
        root = getattr(losses, "grad_fn", None)
        weight = self._weight(losses, weights, samples)
        ahead, left, first = [(root, weight == MEAN, True)], NODES, self.backwards <= FIRST
        terms, of_part, corrected, by_less, scaled = 1, False, False, False, False
        divisors: list[float] = []
        while ahead and left and not self.found:
            left -= 1
            node, divided, of_loss = ahead.pop()
            if node is None:
                continue
            divisor, factors = autograd_engine.divisor(node), autograd_engine.factors(node)
            of_all = self.split and divisor == samples * self.count
            if not divided:
                by_factor = self.split and any(isclose(factor * samples * self.count, 1) for factor in factors)
                scaled = scaled or bool(factors)
                of_one = (
                    divisor == 1 and not scaled and autograd_engine.node_name(node) not in autograd_engine.DIVISIONS
                )
                of_part = of_part or of_all or by_factor or of_one
                corrected = corrected or float(self.count) in factors
                terms += autograd_engine.node_name(node) == "AddBackward0"
            if divisor is None and of_loss:  # a mean within the model is the model's
                divisor = autograd_engine.averaged(node)
            if divisor is not None and not of_all and len(divisors) < DIVISORS:
                divisors.append(divisor)
            shape = autograd_engine.summed_shape(node)
            over_samples = shape[:1] == (samples,) and torch.Size(shape) not in shapes
            if first and not divided and (over_samples or autograd_engine.was_summed(node)):
                self.found, self.on = True, False
            division = autograd_engine.node_name(node) in autograd_engine.DIVISIONS
            linear = autograd_engine.is_linear(node)
            divided = divided or (division and not of_all)
            by_less = by_less or divided
            if divided or of_all or (linear and float(self.count) not in factors):
                of_loss = of_loss and (division or linear)
                ahead += [(behind, divided, of_loss) for behind, _ in node.next_functions]
        for number, divisor in enumerate(divisors):  # if either is the same on all ranks, the loss is as in one process
            self._divisors[f"divisor {self.backwards}.{number}"] = divisor, divisor / samples
        if not first:
            return
        self._alike = self._alike + of_part if batch is not None and batch == self._batch else int(of_part)
        self._batch = batch
        many, all_in_one = max(2, min(ALIKE, samples)), max(ALIKE + 1, min(TERMS, samples))
        each = samples > 1 and (self._alike >= many or (of_part and terms >= all_in_one))
        if not corrected and (each or (weight == SUM and not by_less)):
            self.found, self.on = True, False

    def _weight(self, losses: Any, weights: Any, samples: int) -> int:
        """What the gradients that a backward of each sample's loss starts from make of them: MEAN, SUM, or 0 for
        anything else."""
        given = weights[0] if isinstance(weights, list | tuple) and len(weights) == 1 else weights
        if not isinstance(given, torch.Tensor) or not autograd_engine.is_plain(given) or not given.dim():
            return 0
        if not given.is_floating_point() or given.shape[0] != samples or given.shape != getattr(losses, "shape", None):
            return 0
        low, high = (float(one) for one in given.detach().aminmax())
        if low != high:
            return 0
        of_all = self.split and isclose(low * given.numel() * self.count, 1, rel_tol=1e-3)
        return SUM if low == 1 or of_all else MEAN if isclose(low * given.numel(), 1, rel_tol=1e-3) else 0

    def divisors(self) -> dict[str, int]:
        """The divisors that were found, to be compared with the other ranks'."""
        return {
            f"{name}{what}": zlib.crc32(f"{value:.6g}".encode())
            for name, both in self._divisors.items()
            for what, value in zip(("", " for each"), both, strict=True)
        }

    def notes(self) -> list[str]:
        return [NOTE.format(count=self.count)] if self.found else []
