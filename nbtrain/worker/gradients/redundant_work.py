"""Finds out whether all ranks compute the same: a loop over all of the data, a generator, a slice for each step.

The results are right then, but all ranks but one work for nothing. It shows in their losses, from the first, second,
fourth, eighth … backward of a cell, which the notebook compares when the cell ends. One loss alone may be of a penalty,
and one that never changes says nothing of batches. Where a loader is shared out batches differ, and nothing is looked
at. A hint breaks no cell: where a look fails, there is none.
"""

from __future__ import annotations

import zlib
from math import isfinite
from typing import Any

import torch

from nbtrain.compat import autograd_engine

FEW = 2
"""Different losses that have to be the same on all ranks."""
LARGE = 1 << 16
"""Elements of a tensor that are read at the most."""


class RedundantWork:
    """Looks at what a rank computes in a cell, for a checksum that ranks can compare."""

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, on: bool) -> None:
        """`on`: whether ranks are expected to work on different batches."""
        self.on = on
        self.backwards = 0
        self._losses: list[float] = []

    def shared(self) -> None:
        """A loader deals out batches, or the user already knows that it does not: look no further."""
        self.on = False

    def backward(self, tensors: Any) -> None:
        """A backward is about to begin from these."""
        self.backwards += 1
        if self.backwards & (self.backwards - 1):
            return
        try:
            self._losses.append(_read([tensors] if isinstance(tensors, torch.Tensor) else list(tensors)))
        except Exception:  # a tensor of a class of its own, whose numbers cannot be read
            self.on = False

    def number(self) -> int | None:
        """A checksum of all that was looked at; None: that is not enough to tell."""
        different = {loss for loss in self._losses if loss and isfinite(loss)}
        return zlib.crc32(repr(self._losses).encode()) if self.on and len(different) >= FEW else None


def _read(roots: list[torch.Tensor]) -> float:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or not all(map(autograd_engine.is_plain, roots)):
        raise TypeError("there are no numbers")
    return sum(float(root.detach().reshape(-1)[:LARGE].sum(dtype=torch.float64)) for root in roots)
