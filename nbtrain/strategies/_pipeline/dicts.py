"""`state_dict()` and `load_state_dict()` in a cell, of models and optimizers that are in stages: whole, on every rank.

What is returned is a copy of what there was at that moment, as all ranks need each other for it; a rank that comes
alone is told to call it on every rank. What is loaded every rank has whole, and keeps its own of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies._pipeline.holding import Holding, whole
from nbtrain.strategies.alongside import ODD
from nbtrain.strategies.owned import stand_in

ALONE = (
    "Under pipeline state_dict() needs every rank, each of which has a stage: write `state = model.state_dict()` on "
    "every rank, above `if rank == 0:`. Under --strategy ddp one rank can do it alone"
)


class Dicts:
    """Of one component, while a cell runs."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding

    def on(self) -> None:
        _while.on(self)

    def off(self) -> None:
        _while.off(self)


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.nn.Module.state_dict", "pipeline", _module_state)
    listeners.listen("torch.nn.Module.load_state_dict", "pipeline", _module_load)
    listeners.listen("torch.optim.Optimizer.state_dict", "pipeline", _optimizer_state)
    listeners.listen("torch.optim.Optimizer.load_state_dict", "pipeline", _optimizer_load)


_while: While[Dicts] = While(_put)
_open = _while.owners
_within: list[nn.Module] = []
"""whose state_dict is being made: its parts' are no others"""


def _owner(tensor: torch.Tensor) -> tuple[Holding, int] | None:
    for dicts in _open:
        owner = dicts.holding.owners.of.get(id(tensor))
        if owner is not None:
            return dicts.holding, owner
    return None


def _whole(tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The same on every rank, also where this one has it."""
    found = _owner(of)
    assert found is not None
    holding, owner = found
    try:
        # Numbers to meet by: a rank that waits elsewhere knows from them what this one is doing.
        dist.all_reduce(torch.zeros(ODD, device=of.device))
        return whole(tensor.detach().clone() if owner == holding.rank else tensor, owner, holding.rank)
    except NotSupported as error:
        raise NotSupported(f"{error}. {ALONE}") from None


def _module_state(old: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _within:
            return old(module, *args, **kwargs)
        _within.append(module)
        try:
            found = old(module, *args, **kwargs)
        finally:
            _within.clear()
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        done: dict[int, torch.Tensor] = {}
        for name, tensor in _tensors(module):
            if prefix + name in found and _owner(tensor) is not None:
                if id(tensor) not in done:
                    done[id(tensor)] = _whole(tensor, tensor)
                found[prefix + name] = done[id(tensor)]
        return found

    return state_dict


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _module_load(old: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        foreign = [t for _, t in _tensors(module) if (found := _owner(t)) is not None and found[1] != found[0].rank]
        for tensor in foreign:  # a place to load into, for a moment
            tensor.data = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        try:
            return old(module, *args, **kwargs)
        finally:
            for tensor in foreign:
                tensor.data = stand_in(tensor.data)

    return load_state_dict


def _optimizer_state(old: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = old(optimizer, *args, **kwargs)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for i, p in enumerate(held):
            state = found["state"].get(i)
            if state and _owner(p) is not None:
                found["state"][i] = {
                    key: _whole(value, p) if isinstance(value, torch.Tensor) else value for key, value in state.items()
                }
        return found

    return state_dict


def _optimizer_load(old: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = old(optimizer, *args, **kwargs)
        for dicts in _open:
            dicts.holding.hide_states()
        return result

    return load_state_dict
