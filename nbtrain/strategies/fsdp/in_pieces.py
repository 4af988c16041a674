"""Components whose tensors are in pieces while a cell runs, how their tensors are called, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.base import Component
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.same_on_ranks import differing

DIFFERS = (
    "`{}` writes to {} with a tensor that differs between ranks, and under fsdp each rank keeps its part of one "
    "tensor. Give all ranks the same: reduce(tensor), and random numbers from torch.randn_like(weight) or in a block "
    "`with {}: …`, where all ranks draw the same"
)
UNKNOWN = (
    "`{name}` of {what}, of which under fsdp each rank has some rows: it is not known how that would be done with "
    "pieces. Write `with {line}: …`, and read the tensor from the model inside: there it is complete"
)


class InPieces(Protocol):
    """A component whose tensors are in pieces."""

    component: Component


owners: list[InPieces] = []
"""those whose cells run"""


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (inner for inner in one if isinstance(inner, torch.Tensor))


def refuse_differing(name: str, tensor: DTensor, args: Any, kwargs: Any) -> None:
    read = {key: one for key, one in kwargs.items() if key != "out"}
    found = [one for one in tensors_in(args, read) if not isinstance(one, DTensor) and one.ndim]
    if any(differing(found, tensor.device_mesh.device_type)):
        raise NotSupported(DIFFERS.format(name, *named(tensor)))


def unknown(name: str, tensor: DTensor) -> NotSupported:
    what, line = named(tensor)
    return NotSupported(UNKNOWN.format(name=name, what=what, line=line))


def named(tensor: DTensor) -> tuple[str, str]:
    """(what it is, `whole(…)` with what makes it complete). What a cell has made has a number, and no name."""
    for component in (owner.component for owner in owners):
        for name, p in named_parameters(component):
            where = "model" if "#" in name else re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)
            if _of_one_memory(p, tensor):
                return name, f"whole({where})"
            if _of_one_memory(p.grad, tensor):
                return f"the gradient of {name}", f"whole({where}, gradients=True)"
        for name, optimizer in component.optimizers.items():
            for state in optimizer.state.values():
                if any(_of_one_memory(value, tensor) for value in state.values()):
                    return f"a state of {name}", f"whole({'optimizer' if '#' in name else name})"
    return "a tensor that is made of a model's", "whole()"


def _of_one_memory(one: Any, other: DTensor) -> bool:
    if not isinstance(one, DTensor):
        return False
    return one is other or tensors.of_one_memory(local_part(one), local_part(other))
