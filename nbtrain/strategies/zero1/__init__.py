"""`zero1`: as ddp, and each rank keeps the optimizer's state of its share of the parameters, and steps these.

The user's own optimizer steps them, whatever class it is of: during its step its groups hold the rank's own parameters
only. Then each owner sends its parameters to the others, in buckets. Outside of a step groups are complete, so that
schedulers, clipping and the loop's own lines find what they know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

from nbtrain.compat import tensors
from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.kit.allreduce import AllReduce, Sending
from nbtrain.strategies.kit.gradient_average import Replicated
from nbtrain.strategies.kit.optimizer_shares import OptimizerShares, as_bytes, held_by
from nbtrain.strategies.kit.owned_tensors import OwnedTensor, dealt_out
from nbtrain.strategies.kit.profile_arithmetic import (
    Sent,
    estimate,
    largest_share,
    ring,
    step_bytes,
    trainable,
    width,
    width_sent,
)
from nbtrain.strategies.kit.share_steps import ShareSteps
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World

AHEAD = 3
"""so many buckets of parameters are under way"""
Parcels = list[tuple[int, list[torch.Tensor]]]
"""(owner, parameters that travel together)"""


class Shares(Replicated):
    """A component whose parameters and gradients are whole on every rank."""

    def __init__(self, component: Component, bucket_mb: float, all_reduce: AllReduce) -> None:
        super().__init__(component, bucket_mb, all_reduce)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        parameters = component.parameters()
        self.owners: dict[int, int] = {}
        for trained in (True, False):  # what is frozen may thaw one day
            some = [p for p in parameters if p.requires_grad is trained]
            owners = dealt_out([p.numel() for p in some], self.world_size)
            self.owners |= {id(p): owner for p, owner in zip(some, owners, strict=True)}
        self.parameters = parameters  # held, so that no new one can take over an id
        self.state = OptimizerShares("zero1", lambda p: self.owners.get(id(p)))
        self.capacity = int(bucket_mb * 2**20)
        self.steps = ShareSteps(self.state, self._send)
        self.entered = False
        self._plans: WeakKeyDictionary[Optimizer, tuple[list[int], Parcels]] = WeakKeyDictionary()
        for optimizer in self._divided():
            self.state.cut(optimizer)
        if any(isinstance(optimizer, LBFGS) for optimizer in component.optimizers.values()):
            self.notes.append("LBFGS works on all parameters as one vector: its state is whole on every rank")

    def _divided(self) -> list[Optimizer]:
        return [one for one in self.component.optimizers.values() if not isinstance(one, LBFGS)]

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        if self.entered:
            return
        self.entered = True
        self.steps.enter(self._divided())

    def leave(self) -> None:
        self.entered = False
        self.steps.leave()

    def reset(self) -> None:
        self.steps.restore()
        super().reset()

    # -- a step --------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[float]:
        self.steps.restore()
        self.sync.begin()
        yield 1.0

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> None:
        self.steps.restore()
        super().clip(parameters, max_norm, norm_type)

    def _send(self, optimizer: Optimizer) -> None:
        under_way: deque[Callable[[], None]] = deque()
        for owner, parameters in self._parcels(optimizer):
            under_way.append(_send(owner, parameters, self.rank))
            if len(under_way) > AHEAD:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()

    def _parcels(self, optimizer: Optimizer) -> Parcels:
        """In the same order on all ranks, the owners in turn."""
        held = [p for p in held_by(optimizer) if (p.requires_grad or p.grad is not None) and p.numel()]
        key = list(map(id, held))
        plan = self._plans.get(optimizer)
        if plan is None or plan[0] != key:
            rows = [list(self._of(owner, held)) for owner in range(self.world_size)]
            parcels = [(o, row[i]) for i in range(max(map(len, rows))) for o, row in enumerate(rows) if i < len(row)]
            plan = self._plans[optimizer] = key, parcels
        return plan[1]

    def _of(self, owner: int, held: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
        """One rank's parameters, in buckets of one dtype and device."""
        buckets: list[list[torch.Tensor]] = []
        room: dict[Any, int] = {}
        filling: dict[Any, list[torch.Tensor]] = {}
        for p in (p for p in held if self.owners.get(id(p)) == owner):
            kind, size = (p.dtype, p.device), p.numel() * p.element_size()
            if room.get(kind, 0) < size:
                buckets.append([])
                filling[kind], room[kind] = buckets[-1], max(self.capacity, size)
            filling[kind].append(p)
            room[kind] -= size
        return buckets

    # -- between cells -------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, OwnedTensor]]:
        return self.state.pieces(self._divided())

    def grow(self, component: Component) -> bool:
        """Optimizers and schedulers that came to the same modules."""
        if any(id(p) not in self.owners for p in component.parameters()):
            return False
        known = {id(optimizer) for optimizer in self.component.optimizers.values()}
        self.component = component
        for optimizer in self._divided():
            if id(optimizer) not in known:
                self.state.cut(optimizer)
        return True

    def close(self) -> None:
        self.state.make_whole(self._divided())
        self.drop()

    def drop(self) -> None:
        self.leave()
        super().close()


def _send(owner: int, parameters: list[torch.Tensor], rank: int) -> Callable[[], None]:
    """From the owner to all; what is returned waits for it, and puts it where it belongs."""
    if owner == rank:
        flat = tensors.flatten(parameters)
    else:
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
    work = dist.broadcast(as_bytes(flat), owner, async_op=True)

    def arrived() -> None:
        work.wait()
        if owner != rank:
            tensors.copy(parameters, list(tensors.unflatten(flat, parameters)))

    return arrived


def _parcels(weights: Sequence[Weight], owners: Sequence[int], capacity: int) -> list[int]:
    """Bytes of what is sent after a step, in order (`Shares._parcels`)."""
    rows: list[list[int]] = [[] for _ in range(max(owners, default=0) + 1)]
    room: dict[tuple[int, int], int] = {}
    filling: dict[tuple[int, int], int] = {}
    for weight, owner in zip(weights, owners, strict=True):
        kind, row = (owner, width(weight)), rows[owner]
        if room.get(kind, 0) < weight.bytes:
            filling[kind], room[kind] = len(row), max(capacity, weight.bytes)
            row.append(0)
        row[filling[kind]] += weight.bytes
        room[kind] -= weight.bytes
    return [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]


class Zero1(Strategy):
    """Data parallel training of whole models, with the optimizer's state divided among the ranks."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options(Sending):
        """How gradients travel."""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        if world.ranks == 1:
            return estimate(profile, world)
        weights = trainable(profile)
        owners = dealt_out([weight.numel for weight in weights], world.ranks)
        share = largest_share(weights, owners, lambda weight: weight.state)
        sent = Sent(profile, world, self.options.bucket_mb, width_sent(self.options.comm_dtype, world))
        parcels = _parcels(weights, owners, int(self.options.bucket_mb * 2**20))
        return estimate(
            profile,
            world,
            optimizer=profile.state if profile.optimizer == "LBFGS" else share,
            travelling=sent.travelling,
            step=step_bytes(profile, world, share / max(1, profile.state)),
            after=max(sum(parcels[i : i + AHEAD + 1]) for i in range(len(parcels))) if parcels else 0,
            sent=sent.bytes + ring(profile.gradients, world.ranks),
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to share with
            return Prepared(component)
        return Shares(component, self.options.bucket_mb, AllReduce(self.options.comm_dtype))
