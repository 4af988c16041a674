"""What a sentence calls a tensor of a component, and the `with whole(…)` in which it is complete."""

from __future__ import annotations

import re
from typing import Any, Protocol

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.compat.dtensor import is_divided, local
from nbtrain.strategies.base import Component
from nbtrain.strategies.kit.component_tensors import named_parameters

UNKNOWN = (
    "`{function}` of {what}, {where}: it is not known how that would be done with pieces. Write `with {line}: …`, and "
    "read the tensor from the model inside: there it is complete"
)
HOOKED = (
    "{what} has a hook on its gradient ({function}), which {sees}: remove it, and write "
    "what it does between loss.backward() and optimizer.step(): `with {line}: …`"
)
NODE = (
    "the autograd node (grad_fn, register_multi_grad_hook) of {what}, {where}: write what a hook on it would do "
    "between loss.backward() and optimizer.step(): `with {line}: …`"
)


class HasComponent(Protocol):
    """What a strategy has made of a component."""

    component: Component


owners: list[HasComponent] = []
"""those whose cells run, of strategies that keep tensors in pieces"""


def named(tensor: torch.Tensor, gradient: bool = False, of: Component | None = None) -> tuple[str, str]:
    """(what it is, `whole(…)` with what makes it complete, or its `gradient`). What a cell has made has no name. `of`:
    a component whose cell does not run yet."""
    for component in [owner.component for owner in owners] if of is None else [of]:
        for name, p in named_parameters(component):
            where = "model" if "#" in name else re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)
            if _of_one_memory(p, tensor):
                return name, f"whole({where}, gradients=True)" if gradient else f"whole({where})"
            if _of_one_memory(p.grad, tensor):
                return f"the gradient of {name}", f"whole({where}, gradients=True)"
        for name, optimizer in component.optimizers.items():
            for state in optimizer.state.values():
                if any(_of_one_memory(value, tensor) for value in state.values()):
                    return f"a state of {name}", f"whole({'optimizer' if '#' in name else name})"
    return "a tensor that is made of a model's", "whole(gradients=True)" if gradient else "whole()"


def unknown(function: str, tensor: torch.Tensor, where: str) -> NotSupported:
    """`where`: who has its numbers."""
    what, line = named(tensor)
    return NotSupported(UNKNOWN.format(function=function, what=what, where=where, line=line))


def hooked(p: torch.Tensor, sees: str, function: str = "register_hook", of: Component | None = None) -> NotSupported:
    """`sees`: what a hook on its gradient would."""
    what, line = named(p, gradient=True, of=of)
    return NotSupported(HOOKED.format(what=what, function=function, sees=sees, line=line))


def no_node(p: torch.Tensor, where: str) -> NotSupported:
    """`where`: who has its numbers."""
    what, line = named(p, gradient=True)
    return NotSupported(NODE.format(what=what, where=where, line=line))


def _of_one_memory(value: Any, other: torch.Tensor) -> bool:
    """Of two tensors in pieces, or of two that lie whole on one rank."""
    if value is other or type(value) is not type(other):
        return value is other
    return tensors.of_one_memory(*(local(each) if is_divided(each) else each for each in (value, other)))
