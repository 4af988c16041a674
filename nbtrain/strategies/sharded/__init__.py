"""`sharded`: FairScale's OSS and ShardedDataParallel behind the plain loop.

OSS says which rank owns which parameter, lays the parameters out in flat buffers and sends them from their owners after
a step; ShardedDataParallel reduces each gradient to its owner. The user's own optimizer steps a rank's share, and calls
of the model are not routed: gradients are found where they arrive. Buckets for gradients are off: FairScale's own
default adds up gradients of several steps, where `optimizer.zero_grad()` sets them to None.

What an optimizer holds that may look at all of it at once (kit/lone_steps.py) is whole on every rank, as under ddp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.compat import fairscale
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component, Piece, Prepared, Strategy
from nbtrain.strategies.kit import checkpoint_calls
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.divided_state import held_by
from nbtrain.strategies.kit.divided_steps import PreparedDivided
from nbtrain.strategies.kit.gradient_average import AllReduce, GradientAverage, Replicated, norms_of
from nbtrain.strategies.kit.lone_steps import known_by_name, steps_each_alone, why_whole
from nbtrain.strategies.kit.owned_tensors import OwnedTensor
from nbtrain.strategies.kit.profile_arithmetic import (
    estimate,
    largest_share,
    replicated,
    ring,
    step_bytes,
    trainable,
    width_sent,
)
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World
from nbtrain.strategies.sharded.library import OLD, library, make_oss, make_parallel
from nbtrain.strategies.sharded.reduce_to_owner import GradientElsewhere, ReduceToOwner


class PreparedSharded(PreparedDivided):
    """One component. Parameters that FairScale cannot divide are whole on every rank, as under ddp."""

    divides_gradients = True
    drops_graphs = True

    def __init__(self, component: Component, kinds: list[list[torch.Tensor]]) -> None:
        oss, parallel = library()
        self.rank = dist.get_rank()
        self.oss = [make_oss(oss, parameters) for parameters in kinds]
        self.parameters = [p for parameters in kinds for p in parameters]
        owners = {id(p): rank for one in self.oss for p, rank in fairscale.owners(one).items()}
        rest = [p for p in component.parameters() if id(p) not in owners]
        sync = GradientAverage(rest)
        for p in self.parameters:
            p.grad = None
        made = make_parallel(parallel, self.parameters, self.oss)
        norms = norms_of(component.modules.values())
        self.limit = torch.zeros(())
        """that gradients were clipped to last"""
        self.reducing = ReduceToOwner(made, self.parameters, owners, norms)
        super().__init__(component, sync, "sharded", owners)
        self.notes.append(OLD)

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        super().enter()
        checkpoint_calls.listening.off(self)
        checkpoint_calls.listening.on(self)

    def leave(self) -> None:
        self.pause()
        self.reducing.leave()

    def pause(self) -> None:
        checkpoint_calls.listening.off(self)
        super().leave()

    def reset(self) -> None:
        super().reset()
        self.reducing.forget()

    @contextmanager
    def backward(self) -> Iterator[float]:
        with super().backward() as factor, self.reducing.backward():
            yield factor

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.sync.no_sync():
            before, self.reducing.on = self.reducing.on, False
            self.reducing.held_back = True
            try:
                yield
            finally:
                self.reducing.on = before

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        held = list(parameters)
        super().rescale(held, factor)
        self.reducing.rescale(held, factor)

    @torch.no_grad()
    def before_clip_value(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        super().before_clip_value(parameters)
        self.reducing.catch_up(parameters)
        if any(id(p) in self.owners and p.grad is not None for p in parameters):  # on every rank alike
            raise NotSupported(
                "clip_grad_value_: under sharded a rank has the gradients of its share only: write clip_grad_norm_, or "
                "take --strategy zero1"
            )

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        held, self.limit = list(parameters), torch.as_tensor(max_norm, dtype=torch.float32)
        super().clip(held, max_norm, norm_type)
        self.reducing.catch_up(held)
        if not any(id(p) in self.owners for p in held):
            return None
        mine = [p.grad for p in held if p.grad is not None and self.owners.get(id(p), 0) == self.rank]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in held) else torch.float32
        norm = norm_over_ranks(mine, norm_type, held[0].device, dtype=dtype)
        here = (p.grad for p in held if p.grad is not None and not isinstance(p.grad, GradientElsewhere))
        clip_to(here, norm, max_norm)
        return norm

    def before_step(self, optimizer: Optimizer) -> None:
        self.reducing.catch_up(held_by(optimizer))
        super().before_step(optimizer)

    def to_be_the_same(self, held: list[torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
        return {"limits of a clipping": [self.limit.to(held[0].device) for _ in held[:1]], "weights": [*held]}

    def send(self, optimizer: Optimizer) -> None:
        mine = set(map(id, held_by(optimizer)))
        for one in self.oss:
            if any(id(p) in mine for p in fairscale.owners(one)):
                fairscale.send(one)
        together = [memory for one in self.oss for memory in fairscale.memory(one)]
        for p in held_by(optimizer):
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

    # -- between cells -------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        for p in self.parameters:  # they share their memory, which concerns FairScale alone
            # mypy infers no lambda with a default
            yield p, OwnedTensor(lambda p=p: p, True, self.owners[id(p)] == self.rank, self)  # type: ignore[misc]
        yield from super().pieces()

    def grow(self, component: Component) -> bool:
        held = [p for optimizer in component.optimizers.values() for p in held_by(optimizer)]
        known = {id(optimizer) for optimizer in self.component.optimizers.values()}
        new = [optimizer for optimizer in component.optimizers.values() if id(optimizer) not in known]
        if any(id(p) not in self.owners for p in held) or not all(map(steps_each_alone, new)):
            return False
        return super().grow(component)

    def drop(self) -> None:
        super().drop()
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
            seen |= set(map(id, held_by(optimizer)))
    kinds: dict[Any, list[torch.Tensor]] = {}
    for number, optimizer in enumerate(component.optimizers.values()):
        for p in held_by(optimizer):
            if id(p) not in seen:
                seen.add(id(p))
                kinds.setdefault((number, p.dtype), []).append(p)
    return list(kinds.values())


def _owners(weights: Sequence[Weight], ranks: int) -> list[int]:
    """The owner of each weight. OSS deals them out in their order, each to the rank that has least."""
    load = [0] * ranks
    found = []
    for weight in weights:
        found.append(load.index(min(load)))
        load[found[-1]] += weight.numel
    return found


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
        whole = Replicated(component, 25, AllReduce())
        if component.optimizers:
            whole.notes.append("there is nothing that sharded can divide: it is trained as under ddp")
            whole.notes += why_whole(component.optimizers.values())
        return whole
