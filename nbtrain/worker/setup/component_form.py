"""What has changed in a component: its layers, what is trained, its optimizers, the tensors of their states.

Between cells, and in a block `with whole(…)`, a user changes all of it freely; what has another form than it was set up
for is set up anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.compat.modules import parameter_names
from nbtrain.strategies.base import Component, is_lazy
from nbtrain.strategies.kit.component_tensors import buffers_of, entries, parameters_of
from nbtrain.worker.setup.component_groups import belonging_to


def tensors_in_state(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
    """(parameter, key, tensor), in the same order on all ranks."""
    return (entry for entry in entries(optimizer) if isinstance(entry[2], torch.Tensor))


def tensors_of(component: Component) -> list[torch.Tensor]:
    """Parameters, buffers and the tensors of states, in the same order on all ranks."""
    states = [value for optimizer in component.optimizers.values() for *_, value in tensors_in_state(optimizer)]
    return [*component.parameters(), *buffers_of(component), *states]


def form_of(component: Component) -> Any:
    """What must be the same as before for everything to be still set up."""
    optimizers = component.optimizers.values()
    return (
        [(id(p), p.requires_grad) for p in component.parameters()],
        [name for model in component.modules.values() for name in parameter_names(model)],
        [id(buffer) for buffer in buffers_of(component)],
        [id(module) for model in component.modules.values() for module in model.modules()],
        [[list(map(id, group["params"])) for group in optimizer.param_groups] for optimizer in optimizers],
        [[(id(p), key, id(value)) for p, key, value in tensors_in_state(optimizer)] for optimizer in optimizers],
    )


def outline(component: Component) -> int:
    """A number of what is trained, and of how many tensors there are, as ids differ from rank to rank."""
    trained, names, buffers, modules, groups, states = form_of(component)
    counts = [names, len(buffers), len(modules), [list(map(len, group)) for group in groups], list(map(len, states))]
    return zlib.crc32(repr([[trains for _, trains in trained], *counts]).encode())


def left_behind(components: Iterable[Component]) -> set[int]:
    """Ids of parameters of layers that others have taken the place of, and of their states."""
    ids: set[int] = set()
    for component in components:
        owned = {id(p) for p in component.parameters()}
        for optimizer in component.optimizers.values():
            for p in [*parameters_of(optimizer), *optimizer.state]:
                if id(p) not in owned:
                    state = optimizer.state.get(p)
                    ids |= {id(p), *map(id, state.values() if isinstance(state, dict) else ())}
    return ids


def superseded(component: Component, made: Iterable[Optimizer], one_only: bool) -> list[str]:
    """Names of optimizers in whose place one that was just `made` steps the same model, and that hold a layer that no
    model has any more; where there can be `one_only`, all that hold the same as it, or nothing else that is trained."""
    new = list(made)
    owned = {id(p): p for p in component.parameters()}
    stepped = {id(p) for optimizer in new for p in parameters_of(optimizer)}

    def gives_way(optimizer: Optimizer) -> bool:
        stepped_there = set(map(id, parameters_of(optimizer)))
        if one_only and new:
            return bool(stepped_there & stepped) or not any(
                owned[key].requires_grad for key in stepped_there & owned.keys()
            )
        return bool(stepped_there & stepped and stepped_there - owned.keys())

    old = {
        name: optimizer
        for name, optimizer in component.optimizers.items()
        if not any(optimizer is other for other in new)
    }
    return [name for name, optimizer in old.items() if gives_way(optimizer)]


_FORM = attrgetter("dtype", "shape", "device")


def same_objects(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return before is now or [(name, id(item)) for name, item in before.items()] == [
        (name, id(item)) for name, item in now.items()
    ]


def component_layout(component: Component) -> list[Any]:
    """What must be the same for it to be still set up."""
    names = [name for module in component.modules.values() for name in parameter_names(module)]
    return [*((id(p), p.dtype, p.shape) for p in component.parameters()), *names]


def layout_of(objects: Mapping[str, object]) -> list[Any]:
    """What must be the same as before for everything to be still set up."""
    found: list[Any] = []
    for item in objects.values():
        if isinstance(item, nn.Module):
            held = belonging_to(item)
            if any(map(is_lazy, dict(zip(map(type, held), held, strict=True)).values())):  # one of each type is enough
                held = [p for p in held if not is_lazy(p)]
            found += zip(map(id, held), map(_FORM, held), strict=True)
            found += parameter_names(item)
        elif isinstance(item, Optimizer):
            found += map(id, belonging_to(item))
    return found
