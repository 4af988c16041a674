"""What DeepSpeed's engine cannot take, said before it is set up."""

from __future__ import annotations

import torch

from nbtrain.errors import NotSupported
from nbtrain.strategies._deepspeed import config
from nbtrain.strategies.base import Component


def one_optimizer(component: Component, settings: config.Settings) -> torch.optim.Optimizer:
    """The user's, of parameters that the engine knows."""
    if len(component.optimizers) > 1:
        raise NotSupported(
            f"{' and '.join(component.optimizers)} train parameters of the same model, and DeepSpeed's engine has "
            "one optimizer: join them into one with several groups, or take the strategy ddp"
        )
    if component.loose:
        raise NotSupported(
            f"{', '.join(component.loose)}: the optimizer holds parameters that no module owns, and DeepSpeed's "
            "engine knows those of a model only: make them nn.Parameters of the model, or take the strategy ddp"
        )
    (user,) = component.optimizers.values()
    if settings.get("scheduler") and component.schedulers:
        raise NotSupported(
            f"the config has a scheduler, and so has the notebook ({', '.join(component.schedulers)}): leave one out"
        )
    return user
