"""Registers the strategies for `import pytorch_lightning`; what they do is in `trainer_strategy.py`."""

from __future__ import annotations

from pytorch_lightning import strategies as theirs

from nbtrain.annexes.frameworks.lightning.trainer_strategy import on_ranks, register_all
from nbtrain.engines._local.warm import foresee_import

Strategy = on_ranks(theirs.DDPStrategy, __name__)


def register() -> None:
    register_all(theirs.StrategyRegistry, Strategy)
    foresee_import("pytorch_lightning")
