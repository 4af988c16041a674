"""`sharded`: FairScale's OSS and ShardedDataParallel behind the plain loop.

OSS says which rank owns which parameter, lays the parameters out in flat buffers and sends them from their owners after
a step; ShardedDataParallel reduces each gradient to its owner. The user's own optimizer steps a rank's share, and calls
of the model are not routed: gradients are found where they arrive. Buckets for gradients are off: FairScale's own
default adds up gradients of several steps, where `optimizer.zero_grad()` sets them to None.

What an optimizer holds that may look at all of it at once (kit/per_parameter_optimizers.py) is whole on every rank, as
under ddp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import fairscale
from nbtrain.strategies.base import Component, Piece, Prepared, Promises, Strategy
from nbtrain.strategies.kit import checkpoint_calls
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.component_tensors import added, optimized, parameters_of
from nbtrain.strategies.kit.divided_steps import PreparedDivided
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.gradient_buckets import AllReduce
from nbtrain.strategies.kit.owned_tensors import OwnedTensor
from nbtrain.strategies.kit.per_parameter_optimizers import known_by_name, steps_each_alone, why_whole
from nbtrain.strategies.kit.profile_arithmetic import (
    estimate,
    largest_share,
    replicated,
    ring,
    step_bytes,
    trainable,
    width_sent,
)
from nbtrain.strategies.kit.replicated import Replicated
from nbtrain.strategies.kit.running_statistics import norms_of
from nbtrain.strategies.kit.written_numbers import found_gradients
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World
from nbtrain.strategies.sharded.library import OLD, library, make_oss, make_parallel
from nbtrain.strategies.sharded.reduce_to_owner import GradientElsewhere, ReduceToOwner

BY_VALUE = (
    "clip_grad_value_: under sharded a rank has the gradients of its share only. Write `with whole(model, "
    "gradients=True): nn.utils.clip_grad_value_(model.parameters(), …)`, or clip_grad_norm_"
)


class PreparedSharded(PreparedDivided):
    """One component. Parameters that FairScale cannot divide are whole on every rank, as under ddp."""

    promises = Promises()

    def __init__(self, component: Component, kinds: list[list[torch.Tensor]]) -> None:
        oss, parallel = library()
        self.rank = dist.get_rank()
        self.oss = [make_oss(oss, parameters) for parameters in kinds]
        self.parameters = [p for parameters in kinds for p in parameters]
        owners = {id(p): rank for optimizer in self.oss for p, rank in fairscale.owners(optimizer).items()}
        rest = [p for p in component.parameters() if id(p) not in owners]
        sync = GradientAverage(rest)
        grads = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        made = make_parallel(parallel, self.parameters, self.oss)
        norms = norms_of(component.modules.values())
        self.reducing = ReduceToOwner(made, self.parameters, owners, norms)
        for p, grad in zip(self.parameters, grads, strict=True):  # the same on all ranks, as long as nobody owns it
            p.grad = None if grad is None else grad.clone()  # and no part of a bucket
        super().__init__(component, sync, "sharded", owners)
        self.notes.append(OLD)

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        super().enter()
        self.reducing.enter()
        checkpoint_calls.listening.off(self)
        checkpoint_calls.listening.on(self)

    def leave(self, pause: bool = False) -> None:
        checkpoint_calls.listening.off(self)
        super().leave(pause)
        if not pause:
            self.reducing.leave()

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[float]:
        try:
            with super().backward(sync) as factor, self.reducing.backward(sync):
                yield factor
        except BaseException:
            self.reducing.forget()
            raise

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        parameters_there = list(parameters)
        super().rescale(parameters_there, factor)
        self.reducing.rescale(parameters_there, factor)

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        chosen = list(parameters)
        super().clip(chosen, max_norm, norm_type)
        if norm_type is None:
            if any(id(p) in self.owners and p.grad is not None for p in chosen):  # on every rank alike
                raise NotSupported(BY_VALUE)
            return None
        if not any(id(p) in self.owners for p in chosen):
            return None
        mine = [p.grad for p in chosen if p.grad is not None and self.owners.get(id(p), 0) == self.rank]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in chosen) else torch.float32
        norm = norm_over_ranks(mine, norm_type, chosen[0].device, dtype=dtype)
        here = (p.grad for p in chosen if p.grad is not None and not isinstance(p.grad, GradientElsewhere))
        clip_to(here, norm, max_norm)
        return norm

    def before_step(self, optimizer: Optimizer) -> None:
        held = parameters_of(optimizer)
        self.reducing.catch_up(held)
        found_gradients([p.grad is not None for p in held], usual=True)
        super().before_step(optimizer)

    def to_be_the_same(self, held: list[torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
        return {"weights": [*held]}

    def send(self, optimizer: Optimizer) -> None:
        mine = set(map(id, parameters_of(optimizer)))
        for one in self.oss:
            if any(id(p) in mine for p in fairscale.owners(one)):
                fairscale.send(one)
        together = [memory for one in self.oss for memory in fairscale.memory(one)]
        for p in parameters_of(optimizer):
            owner = self.owners.get(id(p))
            if owner is not None and not self._sent_with_others(p, together):
                flat = p.detach().contiguous().view(-1)
                dist.broadcast(flat.view(torch.uint8), owner)  # not every backend knows every type
                p.data.copy_(flat.view(p.shape))

    def _sent_with_others(self, p: torch.Tensor, together: list[tuple[int, int]]) -> bool:
        """Whether FairScale sends it. It sends what can be trained, from where it has put it: no parameter that a cell
        has given other memory (`p.data = tensor`), and no frozen one that was stepped all the same."""
        if not p.requires_grad:
            return p.grad is None
        at = p.data_ptr()
        return any(start <= at < stop for start, stop in together)

    @torch.no_grad()
    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        chosen = list(parameters)
        super().complete_gradients(chosen)
        self.reducing.catch_up(chosen)

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        for p in self.parameters:
            grad = p.grad
            if grad is not None:  # on every rank, or a stand-in
                mine = self.owners[id(p)] == self.rank
                yield p, OwnedTensor(grad, mine, mine, self)

    # -- between cells -------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        for p in self.parameters:  # they share their memory, which concerns FairScale alone
            yield p, OwnedTensor(p, True, self.owners[id(p)] == self.rank, self, True)
        yield from super().pieces()

    def grow(self, component: Component) -> bool:
        known = all(id(p) in self.owners for p in optimized(component))
        return known and all(map(steps_each_alone, added(self.component, component))) and super().grow(component)

    def close(self, whole: bool = True) -> None:
        super().close(whole)
        self.reducing.close()
        for p in self.parameters:
            p.data = p.data.clone()
        self.parameters, self.oss = [], []


def divisible(component: Component) -> list[list[torch.Tensor]]:
    """What FairScale can divide of what each optimizer steps, by dtype: nothing that has sparse gradients, and nothing
    of an optimizer that may look at all of its parameters at once."""
    seen = {
        id(part.weight)
        for module in component.modules.values()
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    for optimizer in component.optimizers.values():
        if not steps_each_alone(optimizer):
            seen |= set(map(id, parameters_of(optimizer)))
    kinds: dict[Any, list[torch.Tensor]] = {}
    for number, optimizer in enumerate(component.optimizers.values()):
        for p in parameters_of(optimizer):
            if id(p) not in seen:
                seen.add(id(p))
                kinds.setdefault((number, p.dtype), []).append(p)
    return list(kinds.values())


def _owners(weights: Sequence[Weight], ranks: int) -> list[int]:
    """The owner of each weight. OSS deals them out in their order, each to the rank that has least."""
    load = [0] * ranks
    owners = []
    for weight in weights:
        owners.append(load.index(min(load)))
        load[owners[-1]] += weight.numel
    return owners


class Sharded(Strategy):
    """Data parallel training of whole models, with gradients and the optimizer's state divided among the ranks."""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        if world.ranks == 1:
            return estimate(profile, world)
        if not known_by_name(profile.optimizer):
            return replicated(profile, world, 25, width_sent("none", world))
        weights = trainable(profile)
        owners = _owners(weights, world.ranks)
        state = largest_share(weights, owners, lambda weight: weight.state)
        mine = largest_share(weights, owners, lambda weight: weight.bytes)
        return estimate(
            profile,
            world,
            gradients=mine,  # the others' are let go of as they arrive there, which may be at the end of the backward
            optimizer=state,
            step=step_bytes(profile, world, mine / max(1, profile.gradients)),
            sent=2 * ring(profile.gradients, world.ranks),
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        kinds = divisible(component)
        if kinds:
            return PreparedSharded(component, kinds)
        replicated = Replicated(component, 25, AllReduce())
        if component.optimizers:
            replicated.notes.append("there is nothing that sharded can divide: it is trained as under ddp")
            replicated.notes += why_whole(component.optimizers.values())
        return replicated
