"""When a checkpoint is due: every K steps, or every so many minutes, decided the same on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nbtrain.training.collectives import connected, on_the_wire

LOOK = 0.5
"""Seconds between two looks at rank 0's clock, about."""


@dataclass(slots=True)
class Interval:
    """Asked at the end of each step, on every rank."""

    steps: int | None = None
    seconds: float | None = None
    _last: float = 0.0
    _looked: float = 0.0
    _passes: int = 1
    """steps from one look to the next"""
    _left: int = 1

    def begin(self) -> None:
        self._last = self._looked = time.monotonic()

    def due(self, step: int) -> bool:
        """`step`: the number of the one that has ended."""
        if self.seconds is None:
            return self.steps is not None and step > 0 and step % self.steps == 0
        self._left -= 1
        if self._left > 0:
            return False
        now = time.monotonic()
        each = (now - self._looked) / self._passes
        until = self._last + self.seconds - now
        self._looked = now
        self._passes = max(1, min(int(min(LOOK, max(0.0, until)) / max(each, 1e-6)), 1000))
        decision = torch.tensor([until <= 0, self._passes], dtype=torch.int64)
        if connected():  # the clocks differ, and ranks that decide by their own would part
            wire = decision.to(on_the_wire(decision))
            dist.broadcast(wire, 0)
            decision = wire.cpu()
        is_due, self._passes = bool(decision[0]), int(decision[1])
        self._left = self._passes
        if is_due:
            self._last = now
        return is_due
