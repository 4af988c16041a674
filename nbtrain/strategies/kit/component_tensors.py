"""What a component consists of, besides the parameters that it lists itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from nbtrain.compat.modules import tensors_of
from nbtrain.strategies.base import Component, is_lazy


def named_parameters(component: Component) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of modules, by the names that the notebook has for them."""
    for where, module in component.modules.items():
        for name, p in module.named_parameters():
            yield f"{where}.{name}", p


def buffers_of(component: Component) -> list[torch.Tensor]:
    buffers = [b for module in component.modules.values() for b in tensors_of(module)[1]]
    return list({id(b): b for b in buffers if not is_lazy(b)}.values())


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimized(component: Component) -> list[torch.Tensor]:
    """What its optimizers hold."""
    return [p for optimizer in component.optimizers.values() for p in parameters_of(optimizer)]


def added(before: Component, now: Component) -> list[Optimizer]:
    """The optimizers that a component did not have before."""
    known = set(map(id, before.optimizers.values()))
    return [optimizer for optimizer in now.optimizers.values() if id(optimizer) not in known]
