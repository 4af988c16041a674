"""`none`: ranks and a process group, nothing touched, for code that brings its own (accelerate, Lightning)."""

from __future__ import annotations

from typing import ClassVar

from nbtrain.strategies.base import Strategy


class NoStrategy(Strategy):
    """Models, optimizers and loaders stay as they are; every rank sees every batch."""

    hands_off: ClassVar[bool] = True

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        return 0, 1
