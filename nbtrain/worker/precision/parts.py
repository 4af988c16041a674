"""The parts of a runtime that compute in another number format, made where `--precision` asks for one."""

from __future__ import annotations

import torch

from nbtrain.strategies.base import Strategy
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.precision.autocast import Forwards, chosen
from nbtrain.worker.precision.loss_scaling import LossScaling
from nbtrain.worker.precision.low_precision_weights import LowPrecisionStrategy, LowPrecisionWeights


def precision_parts(
    precision: str, strategy: Strategy, device: torch.device, rank: int, steps: Steps
) -> tuple[Strategy, LowPrecisionWeights | None, LossScaling | None, Forwards | None]:
    """The strategy that sets models up, and the parts that the format needs. None: it does without, or the strategy
    computes in it by itself."""
    form = chosen(precision, strategy, device)
    if form is None:
        return strategy, None, None, None
    weights = LowPrecisionWeights(form.dtype, rank) if form.weights else None
    scaling = LossScaling(steps) if form.scaled else None
    sets_up = strategy if weights is None else LowPrecisionStrategy(strategy, weights)
    return sets_up, weights, scaling, Forwards(form, device, scaling)
