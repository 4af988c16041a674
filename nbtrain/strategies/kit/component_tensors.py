"""What a component consists of, besides the parameters that it lists itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether it has no content yet (lazy parameters, which wait for the first batch, do not count)."""
    return tensor.device.type == "meta" and not is_lazy(tensor)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimized(component: Component) -> list[torch.Tensor]:
    """What its optimizers hold."""
    return [p for optimizer in component.optimizers.values() for p in parameters_of(optimizer)]


def added(before: Component, now: Component) -> list[Optimizer]:
    """The optimizers that a component did not have before."""
    known = set(map(id, before.optimizers.values()))
    return [optimizer for optimizer in now.optimizers.values() if id(optimizer) not in known]


def entries(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str, Any]]:
    """(parameter, key, value) of its state, in the same order on all ranks: also of what no group has any more."""
    grouped = parameters_of(optimizer)
    known = set(map(id, grouped))
    left = [p for p in optimizer.state if isinstance(p, torch.Tensor) and id(p) not in known]
    for p in (*grouped, *left):
        state: Any = optimizer.state.get(p)
        for key in sorted(state, key=str) if isinstance(state, dict) else ():
            yield p, key, state[key]
