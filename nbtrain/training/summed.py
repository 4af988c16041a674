"""Losses whose mean over the ranks is not one process's loss, where ranks have shares of a batch and average gradients.

The mean of the ranks' *sums* over a batch is one N-th of what one process has with the whole batch. And where each rank
divides by a number of its own (targets that are ignored, class weights, a mask), the mean of these means is not the
mean of all. Both are read from the graph of the first losses of a cell, so they are found wherever they stand. The
first is known to a rank; the second, when the ranks' numbers are compared as the cell ends (session/compared.py).
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from nbtrain.compat import engine

LOOKS, NODES, DIVISORS = 4, 32, 8
"""backwards of a cell that are looked at, nodes of each, and numbers that are compared"""
NOTE = (
    "the loss is a sum over the samples of a batch, and gradients are averaged over the ranks: a step is that of one "
    'process with 1/{count} of its gradient. Write (loss * world_size).backward(), or reduction="mean"'
)


class Summed:
    """Of one rank. `begin` before each cell."""

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, count: int, split: bool = False) -> None:
        """`count`: ranks, or groups of ranks, to which batches are dealt out. `split`: each gets a part of one, whose
        size is the number by which a sum may be divided."""
        self.count, self.split, self.found = count, split, False
        self.looks = LOOKS if count > 1 else 0
        self._divisors: list[tuple[float, float]] = []

    def look(self, losses: Any, samples: int, shapes: set[torch.Size]) -> None:
        """A backward begins. `samples`: of this rank's last batch. `shapes`: of weights, a sum over which is meant.
        A hint breaks no cell: where a look fails, there is none."""
        self.looks -= 1
        try:
            self._look(losses, samples, shapes)
        except Exception:
            self.begin(1)

    def _look(self, losses: Any, samples: int, shapes: set[torch.Size]) -> None:
        root = getattr(losses, "grad_fn", None)
        ahead, left = [(root, False)], NODES
        while ahead and left and not self.found:
            left -= 1
            node, divided = ahead.pop()
            if node is None:
                continue
            divisor = engine.divisor(node)
            of_all = self.split and divisor == samples * self.count
            if divisor is not None and not of_all:
                self._divided(divisor, samples)
            if not divided and self._is_sum(node, samples, shapes):
                self.found, self.looks = True, 0
            divided = divided or (engine.node_name(node) in engine.DIVISIONS and not of_all)
            linear = engine.node_name(node) in engine.LINEAR and float(self.count) not in engine.factors(node)
            if divided or of_all or linear:
                ahead += [(behind, divided) for behind, _ in node.next_functions]

    def _is_sum(self, node: Any, samples: int, shapes: set[torch.Size]) -> bool:
        shape = engine.summed_shape(node)
        return engine.was_summed(node) or (shape[:1] == (samples,) and torch.Size(shape) not in shapes)

    def _divided(self, by: float, samples: int) -> None:
        """By a number that is the same on all ranks, or by one that goes with the size of their batches: both are as in
        one process."""
        if len(self._divisors) < DIVISORS:
            self._divisors.append((by, by / samples))

    def divisors(self) -> dict[str, int]:
        """To be compared with the other ranks'."""
        return {
            f"divisor {number}{what}": zlib.crc32(f"{value:.6g}".encode())
            for number, both in enumerate(self._divisors)
            for what, value in zip(("", " for each"), both, strict=True)
        }

    def notes(self) -> list[str]:
        return [NOTE.format(count=self.count)] if self.found else []
