"""One component that is set up: who steps it, and what cannot be set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.modules import named_parts
from nbtrain.strategies.base import Component, HoldsModules, Prepared, Shards, Strategy, gradient_pieces_of, is_lazy
from nbtrain.strategies.kit.component_tensors import buffers_of, is_blank
from nbtrain.worker.ranks.collectives import gather
from nbtrain.worker.setup.component_groups import belonging_to

if TYPE_CHECKING:
    from nbtrain.worker.setup.meta_init import MetaInit


@dataclass(slots=True)
class SetUpComponent:
    """One component as it was set up."""

    prepared: Prepared
    objects: frozenset[int]
    """ids of modules, optimizers and schedulers"""
    parameters: list[torch.Tensor]
    """kept alive, so that ids are not used again"""
    layout: list[Any]
    """its `component_layout`"""

    def ids(self) -> set[int]:
        return {id(p) for p in self.parameters}

    def now(self) -> set[int]:
        """Its objects, with copies that a cell has made of a model in pieces."""
        return {*self.objects, *map(id, self.prepared.component.modules.values())}


TRIES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""seconds to wait for what is let go of"""
HELD_BY_SOME = (
    "some ranks still hold a model or an optimizer that others have let go of, and the next one is set up by all of "
    "them: keep it on every rank, or on none (its state_dict() can be kept)"
)
ANOTHER_OPTIMIZER = (
    "{} is to step weights that another optimizer steps, the last that was made for them, and this strategy has one: "
    "join them into one with several groups, or take --strategy ddp"
)


OTHER_GROUPS = (
    "{} holds other parameters than it was set up with: write optimizer.add_param_group(...) for what is to come, and "
    "change optimizer.param_groups otherwise in `with whole(model, optimizer): …`"
)


def prepared_by(strategy: Strategy, component: Component, precision: str, world_size: int) -> Prepared:
    """What the strategy's `set_up` returns, checked: a strategy that is written in a cell may return something else."""
    prepared = strategy.set_up(component, precision)
    if not isinstance(prepared, Prepared):
        raise UsageError(
            f"{type(strategy).__name__}.set_up returned {type(prepared).__name__}: it has to return an "
            "nbtrain.Prepared, as in `return nbtrain.Prepared(component)`"
        )
    if getattr(prepared, "component", None) is not component:
        raise UsageError(
            f"what {type(strategy).__name__}.set_up returned has another component, or none: an `__init__` of a class "
            "of your own has to call super().__init__(component)"
        )
    if isinstance(prepared, Shards) and type(prepared).pieces is Shards.pieces:
        raise UsageError(f"{type(prepared).__name__} is a Shards without pieces: write pieces(self)")
    own = getattr(prepared, "inner", prepared)  # in 16 bits
    if world_size > 1 and not isinstance(own, Shards) and type(own).backward is Prepared.backward:
        raise UsageError(
            f"{type(own).__name__} has no backward, so that each of the {world_size} ranks would train a model of its "
            "own: write backward(self, sync), which makes the gradients right; where the ranks come together otherwise "
            "it can return contextlib.nullcontext(1.0)"
        )
    return prepared


def released(prepared: Prepared) -> bool:
    """Whether it holds models of which no rank has the whole."""
    own = getattr(prepared, "inner", prepared)
    return isinstance(own, Shards) and type(own).release_modules is not HoldsModules.release_modules


def knows(prepared: Prepared, optimizer: Optimizer) -> bool:
    steps = prepared.stepped_by if isinstance(prepared, Shards) else None
    return steps is None or steps.get(optimizer) == set(map(id, belonging_to(optimizer)))


def check_groups(prepared: Prepared, optimizer: Optimizer) -> None:
    """Raises where the optimizer would not step what it holds."""
    steps = prepared.stepped_by if isinstance(prepared, Shards) else None
    if steps is None or knows(prepared, optimizer):
        return
    if optimizer in steps:
        raise NotSupported(OTHER_GROUPS.format(type(optimizer).__name__))
    held = set(map(id, belonging_to(optimizer)))
    if not all(map(held.isdisjoint, steps.values())):
        raise NotSupported(ANOTHER_OPTIMIZER.format(type(optimizer).__name__))


def complete_gradients(prepared: Prepared) -> None:
    """Before it is closed in the middle of a cell: gradients that wait for a step, on every rank. Collective."""
    for p, piece in gradient_pieces_of(prepared):
        if not (is_divided(p) or piece.everywhere):
            from nbtrain.strategies.kit.owned_tensors import full_tensor  # of some strategies alone

            p.grad = full_tensor(piece, p.device)


def replaced_by(prepared: Prepared) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return prepared.replaced if isinstance(prepared, Shards) else []


RENORMED = (
    "{name} has max_norm, by which each forward changes the rows that it reads, on each rank those of its own samples: "
    "set {name}.max_norm = None, and write `with torch.no_grad(): {name}.weight.renorm_({norm:g}, 0, {most:g})` after "
    "optimizer.step()"
)


def refuse_renormed(component: Component) -> None:
    """Raise where forwards write to weights."""
    for name, model in component.modules.items():
        for path, part in named_parts(model):
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
                path = f"{name}.{path}" if path else name
                raise NotSupported(RENORMED.format(name=path, norm=part.norm_type, most=part.max_norm))


def refuse_lazy(component: Component) -> None:
    """Raise where an optimizer holds what has no size yet: nobody could say which rank has how much of it."""
    for name, optimizer in component.optimizers.items():
        if any(map(is_lazy, belonging_to(optimizer))):
            raise NotSupported(
                f"{name} holds parameters of lazy layers (LazyLinear, say), which get their sizes from a batch: call "
                "the model with one batch in a cell before, which is not distributed, or make the optimizer after the "
                "model's first call"
            )


def move_to_device(component: Component, device: torch.device) -> None:
    """Move parameters, gradients, buffers and optimizer state to the device, in place: tensors keep their identity."""
    for tensor in (*component.parameters(), *buffers_of(component)):
        if tensor.device != device and not (is_blank(tensor) or is_divided(tensor)):
            tensor.data = tensor.data.to(device)
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
    for optimizer in component.optimizers.values():
        for group in optimizer.param_groups:
            counts_there = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                state = optimizer.state.get(p) or {}
                for key, value in state.items():
                    # torch keeps step counts on the CPU unless a kernel reads them
                    there = isinstance(value, torch.Tensor) and (key != "step" or counts_there)
                    if not there or is_divided(value):  # the strategy says where its rows wait
                        continue
                    if value.device == device:
                        continue
                    if type(value) is torch.Tensor:  # what comes home is known by its object
                        value.data = value.data.to(device)
                    else:  # of a class that has its content in other tensors
                        state[key] = value.to(device)


def blanks_of(component: Component) -> MetaInit | None:
    """What fills the component's tensors that have no content. Collective where there are any."""
    if not any(map(is_blank, [*component.parameters(), *buffers_of(component)])):
        return None
    from nbtrain.worker.setup.meta_init import MetaInit  # few models are made without content

    return MetaInit.of(component)


def views_of(named: Iterable[tuple[str, torch.Tensor]]) -> Callable[[Any, Any], None]:
    """In a cell, before these are set up: what shows their memory. What is returned has it show what they have become,
    by then, or refuse to be used. Collective."""
    from nbtrain.worker.setup.taken_tensors import (  # most cells set nothing up in their middle
        EARLIER,
        Lying,
        hand_over,
    )

    lying = Lying(named)

    def follow(named: Iterable[tuple[str, torch.Tensor]], replaced: Callable[[Any], None]) -> None:
        left = lying.left(named)
        counts = gather(len(left))
        hand_over(left, min(counts) == max(counts), replaced, EARLIER)

    return follow
