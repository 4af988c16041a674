"""Prepares the measurement of a trial: imports what the strategy needs, so that it does not count."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import nbtrain.registry as registry
from nbtrain.specs import RunSpec

if TYPE_CHECKING:
    from nbtrain.training.measure.trial_steps import TrialSteps


def trial_steps(spec: RunSpec, device: str) -> TrialSteps:
    import torch

    from nbtrain.training.measure.trial_steps import TrialSteps

    entry = registry.find_strategy(spec.strategy)
    for name in entry.needs.packages if entry is not None else ():
        if name not in sys.modules:  # a library is loaded once for all models, and must not count for one
            with suppress(Exception):  # why it cannot be had is said where it is used
                import_module(name)
    assert spec.trial is not None
    return TrialSteps(spec.trial, torch.device(device))
