"""`none`: ranks and a process group, nothing touched, for code that brings its own (accelerate, Lightning)."""

from __future__ import annotations

from nbtrain.strategies.base import Facts, Strategy


class NoStrategy(Strategy):
    """Models, optimizers and loaders stay as they are; every rank sees every batch."""

    facts = Facts(hands_off=True, batch_per="pool")
