"""`zero1`: as ddp, and each rank keeps the optimizer's state of its share of the parameters, and steps these.

The user's own optimizer steps them: during its step its groups hold the rank's own parameters only. Then each owner
sends its parameters to the others, in buckets. Outside of a step groups are complete, so that schedulers, clipping and
the loop's own lines find what they know. An optimizer that is not torch's may look at all parameters at once: every
rank steps it whole (kit/per_parameter_optimizers.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.compat import tensors
from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.kit.component_tensors import parameters_of
from nbtrain.strategies.kit.divided_steps import PreparedDivided
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.gradient_buckets import AllReduce, AllReduceOptions
from nbtrain.strategies.kit.owned_tensors import dealt_out
from nbtrain.strategies.kit.per_parameter_optimizers import known_by_name
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
from nbtrain.strategies.kit.running_statistics import norms_of
from nbtrain.strategies.memory_estimate import Estimate, Profile, World

AHEAD = 3
"""the number of buckets of parameters that are under way at a time"""
T = TypeVar("T")
Parcels = list[tuple[int, list[T]]]
"""(owner, what it sends in one message)"""


class PreparedZero1(PreparedDivided):
    """A component whose parameters and gradients are whole on every rank."""

    promises = replace(PreparedDivided.promises, averages_before_step=True)

    def __init__(self, component: Component, bucket_mb: float, all_reduce: AllReduce) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        parameters = component.parameters()  # `sync` holds them, so that no new one can take over an id
        owners: dict[int, int] = {}
        for trained in (True, False):  # what is frozen may thaw one day
            some = [p for p in parameters if p.requires_grad is trained]
            dealt = dealt_out([p.numel() for p in some], self.world_size)
            owners |= {id(p): owner for p, owner in zip(some, dealt, strict=True)}
        self.capacity = int(bucket_mb * 2**20)
        self._plans: WeakKeyDictionary[Optimizer, tuple[list[int], Parcels[torch.Tensor]]] = WeakKeyDictionary()
        norms = norms_of(component.modules.values())
        sync = GradientAverage(parameters, bucket_mb, norms, all_reduce)
        super().__init__(component, sync, "zero1", owners)

    def send(self, optimizer: Optimizer) -> None:
        under_way: deque[Callable[[], None]] = deque()
        for owner, parameters in self.parcels(optimizer):
            under_way.append(_send(owner, parameters, self.rank))
            if len(under_way) > AHEAD:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()

    def parcels(self, optimizer: Optimizer) -> Parcels[torch.Tensor]:
        """What the owners send after a step, in an order that is the same on all ranks."""
        stepped = [p for p in parameters_of(optimizer) if (p.requires_grad or p.grad is not None) and p.numel()]
        key = list(map(id, stepped))
        plan = self._plans.get(optimizer)
        if plan is None or plan[0] != key:
            owned = [p for p in stepped if id(p) in self.owners]
            owners = [self.owners[id(p)] for p in owned]
            parcels = in_parcels(
                owned, owners, self.capacity, lambda p: p.numel() * p.element_size(), lambda p: (p.dtype, p.device)
            )
            plan = self._plans[optimizer] = key, parcels
        return plan[1]

    def grow(self, component: Component) -> bool:
        """Only optimizers and schedulers may have been added."""
        return all(id(p) in self.owners for p in component.parameters()) and super().grow(component)


def _send(owner: int, parameters: list[torch.Tensor], rank: int) -> Callable[[], None]:
    """Send parameters from their owner to all. What is returned waits, and copies them into their places."""
    if owner == rank:
        flat = tensors.flatten(parameters)
    else:
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
    work = dist.broadcast(flat.view(torch.uint8), owner, async_op=True)  # not every backend knows every type

    def arrived() -> None:
        work.wait()
        if owner != rank:
            tensors.copy(parameters, list(tensors.unflatten(flat, parameters)))

    return arrived


def in_parcels(
    items: Sequence[T], owners: Sequence[int], capacity: int, size: Callable[[T], int], kind: Callable[[T], Any]
) -> Parcels[T]:
    """Each owner's items in buckets of one kind and up to `capacity` bytes; the owners in turn."""
    rows: list[list[list[T]]] = [[] for _ in range(max(owners, default=0) + 1)]
    filling: dict[Any, list[T]] = {}
    room: dict[Any, int] = {}
    for item, owner in zip(items, owners, strict=True):
        key, bytes = (owner, kind(item)), size(item)
        if room.get(key, 0) < bytes:
            filling[key], room[key] = [], max(capacity, bytes)
            rows[owner].append(filling[key])
        filling[key].append(item)
        room[key] -= bytes
    return [(owner, row[i]) for i in range(max(map(len, rows))) for owner, row in enumerate(rows) if i < len(row)]


class Zero1(Strategy):
    """Data parallel training of whole models, with the optimizer's state divided among the ranks."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options(AllReduceOptions):
        """How gradients travel."""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        if world.ranks == 1:
            return estimate(profile, world)
        weights = trainable(profile)
        owners = dealt_out([weight.numel for weight in weights], world.ranks)
        share = profile.state
        if known_by_name(profile.optimizer):
            share = largest_share(weights, owners, lambda weight: weight.state)
        sent = Sent(profile, world, self.options.bucket_mb, width_sent(self.options.comm_dtype, world))
        capacity = int(self.options.bucket_mb * 2**20)
        parcels = in_parcels(weights, owners, capacity, lambda weight: weight.bytes, width)
        sizes = [sum(weight.bytes for weight in parcel) for _, parcel in parcels]
        return estimate(
            profile,
            world,
            optimizer=share,
            travelling=sent.travelling,
            step=step_bytes(profile, world, share / max(1, profile.state)),
            after=max((sum(sizes[i : i + AHEAD + 1]) for i in range(len(sizes))), default=0),
            sent=sent.bytes + ring(profile.gradients, world.ranks),
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to share with
            return Prepared(component)
        return PreparedZero1(component, self.options.bucket_mb, AllReduce(self.options.comm_dtype))
