"""Where and when a checkpoint is due: every K steps, or every so many minutes, decided the same on every rank."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.worker.ranks.collectives import connected, on_the_wire

LOOK = 0.5
"""Seconds between two looks at rank 0's clock, about."""


@dataclass(slots=True)
class SaveSchedule:
    """`--save-every`, `--save-to` and `--keep-last` in one cell."""

    steps: int | None
    seconds: float | None
    to: Path
    keep: int
    _last: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)
    _passes: int = 1
    """steps from one look at the clock to the next"""
    _left: int = 1

    @classmethod
    def of(cls, run: RunSpec) -> SaveSchedule | None:
        if run.save_steps is None and run.save_seconds is None:
            return None
        return cls(run.save_steps, run.save_seconds, place_of(run.save_to), run.keep_last)

    def due(self, step: int) -> bool:
        """Whether to save now. Asked at the end of each step, on every rank. `step`: its number."""
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


def place_of(path: Any) -> Path:
    """A checkpoint's full path: the working directory may change while it is written."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"a checkpoint's path is text, as in save('best', model=model), not {type(path).__name__}")
    return Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
