"""What a Trainer's checkpoint says of the arguments that its module was made with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from nbtrain.errors import NbtrainError
from nbtrain.training.checkpoints.api import load

LEFT_OUT = "(left out)"
"""Among them: the names of those that a checkpoint does not hold, classes for example."""


def saved_hyperparameters(path: Any) -> dict[str, Any]:
    """None, where another than a Trainer has made it."""
    found = _Reader()
    with suppress(NbtrainError):
        load(path, trainer=found)
    return dict(found.__dict__["state"].get("hparams", {}))


class _Reader(nn.Module):
    """In place of a Trainer's counters, where there is no Trainer yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(0))
        self.__dict__["state"] = {}

    def get_extra_state(self) -> Any:
        return {}

    def set_extra_state(self, state: Any) -> None:
        self.__dict__["state"] = state
