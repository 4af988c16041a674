"""Finds losses whose mean over the ranks is not the loss of one process, where ranks average gradients.

The mean of the ranks' *sums* over a batch is one N-th of what one process has with the whole batch. And where each rank
divides by a number of its own (targets that are ignored, class weights, a mask, a mean over some of the samples), the
mean of these means is not the mean of all. Both are read from the graphs of losses, so they are found wherever they
stand. The first is known to a rank from its losses; the second, when the ranks' numbers are compared as the cell ends
(notebook/report/cell_report.py). It may turn up late, so this is looked at in the first four backwards and in the
eighth, sixteenth, thirty-second … of a cell. What no number in a graph says is left to `%distributed verify`.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from nbtrain.compat import autograd_engine

FIRST, NODES, DIVISORS = 4, 32, 8
"""backwards of a cell that are all looked at, nodes of each, and numbers of each that are compared"""
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
        self._divisors: dict[str, tuple[float, float]] = {}

    def due(self) -> bool:
        """A backward begins: whether it is one to `look` at. The ranks have to look at the same ones."""
        self.backwards += self.on
        return self.on and (self.backwards <= FIRST or not self.backwards & (self.backwards - 1))

    def look(self, losses: Any, samples: int, shapes: set[torch.Size], starts: Any = None) -> None:
        """A backward begins. `samples`: of this rank's last batch. `shapes`: of weights, a sum over which is meant.
        `starts`: the gradients that it begins with. A hint breaks no cell: where a look fails, there is none."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        try:
            self._look(losses, samples, shapes, starts)
        except Exception:  # of a class of tensors of its own
            self.begin(1)

    def _look(self, losses: Any, samples: int, shapes: set[torch.Size], starts: Any) -> None:
        ahead, left = [(getattr(losses, "grad_fn", None), False, True)], NODES
        summed = samples > 1 and getattr(losses, "shape", None) == (samples,) and _is_ones(starts)
        divisors: list[float] = []
        while ahead and left and not self.found:
            left -= 1
            node, divided, of_loss = ahead.pop()
            if node is None:
                continue
            divisor, name = autograd_engine.divisor(node), autograd_engine.node_name(node)
            of_all = self.split and divisor == samples * self.count
            corrected = float(self.count) in autograd_engine.factors(node)
            if divisor is None and of_loss:  # a mean within the model is the model's
                divisor = autograd_engine.averaged(node)
            if divisor is not None and not of_all and len(divisors) < DIVISORS:
                divisors.append(divisor)
            shape = autograd_engine.summed_shape(node)
            over_samples = shape[:1] == (samples,) and torch.Size(shape) not in shapes
            if not divided and (over_samples or autograd_engine.was_summed(node)):
                self.found, self.on = True, False
            division, linear = name in autograd_engine.DIVISIONS, autograd_engine.is_linear(node)
            divided = divided or (division and not of_all)
            summed = summed and not divided and not corrected
            if divided or of_all or (linear and not corrected):
                of_loss = of_loss and (division or linear)
                ahead += [(behind, divided, of_loss) for behind, _ in node.next_functions]
        if summed:
            self.found, self.on = True, False
        for number, divisor in enumerate(divisors):  # if either is the same on all ranks, the loss is as in one process
            self._divisors[f"divisor {self.backwards}.{number}"] = divisor, divisor / samples

    def divisors(self) -> dict[str, int]:
        """The divisors that were found, to be compared with the other ranks'."""
        return {
            f"{name}{what}": zlib.crc32(f"{value:.6g}".encode())
            for name, both in self._divisors.items()
            for what, value in zip(("", " for each"), both, strict=True)
        }

    def notes(self) -> list[str]:
        return [NOTE.format(count=self.count)] if self.found else []


def _is_ones(starts: Any) -> bool:
    """Whether a backward of each sample's loss begins with these, which sums them."""
    given = starts[0] if isinstance(starts, list | tuple) and len(starts) == 1 else starts
    return isinstance(given, torch.Tensor) and autograd_engine.is_plain(given) and bool((given == 1).all())
