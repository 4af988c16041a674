"""The strategy for `import pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning import strategies as theirs

from nbtrain.engines._local.warm import foresee_import
from nbtrain.lightning.strategies import on_ranks, register_all

Strategy = on_ranks(theirs.DDPStrategy, __name__)


def register() -> None:
    register_all(theirs.StrategyRegistry, Strategy)
    foresee_import("pytorch_lightning")
