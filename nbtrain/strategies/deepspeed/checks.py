"""What DeepSpeed's engine cannot take, said before it is set up."""

from __future__ import annotations

import torch

from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import config


def in_single(component: Component) -> None:
    """DeepSpeed steps a copy of the weights in float32."""
    for where, module in component.modules.items():
        for name, p in module.named_parameters():
            if p.dtype == torch.float64 or p.is_complex():
                raise NotSupported(
                    f"{where}.{name} is {str(p.dtype).removeprefix('torch.')}, and DeepSpeed steps weights and the "
                    "optimizer's state in float32: write --strategy ddp, or make the model float32 (model.float()) "
                    "in a cell before"
                )


def one_optimizer(component: Component, settings: config.Settings) -> torch.optim.Optimizer:
    """The user's, of parameters that the engine knows."""
    if len(component.optimizers) > 1:
        raise NotSupported(
            f"{' and '.join(component.optimizers)} train parameters of the same model, and DeepSpeed's engine has "
            "one optimizer: join them into one with several groups, or, where a new one takes the place of the other, "
            "make it and the layers that it is for in a cell before, which is not distributed, or take --strategy ddp"
        )
    if component.loose:
        raise NotSupported(
            f"{', '.join(component.loose)}: the optimizer holds parameters that no module owns, and DeepSpeed's "
            "engine knows those of a model only: make them nn.Parameters of the model (if they are of a layer that was "
            "taken out of it, make the optimizer anew, in a cell that is not distributed), or take the strategy ddp"
        )
    (user,) = component.optimizers.values()
    if settings.get("scheduler") and component.schedulers:
        raise NotSupported(
            f"the config has a scheduler, and so has the notebook ({', '.join(component.schedulers)}): leave one out"
        )
    return user
