"""What a Trainer's checkpoint says of the arguments that its module was made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.compat.modules import EXTRA_STATE
from nbtrain.training.checkpoints import safe_load
from nbtrain.training.checkpoints.api import current
from nbtrain.training.checkpoints.content import whole

LEFT_OUT = "(left out)"
"""Among them: the names of those that a checkpoint does not hold, classes for example."""


def saved_hyperparameters(path: Any, weights_only: bool, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """None, where another than a Trainer has made it."""
    source = current().opened(path, weights_only)
    saved = source.tree["modules"].get("trainer", {}).get("extra", {}).get(EXTRA_STATE, {})
    found = {name: value for name, value in saved.get("hparams", {}).items() if wanted(name)}
    safe_load.check_taken(source.path, found)
    return {name: whole(value, source.read) for name, value in found.items()}
