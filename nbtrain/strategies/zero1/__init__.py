"""`zero1`: as ddp, and each rank keeps the optimizer's state of its share of the parameters, and steps these.

The user's own optimizer steps them, whatever class it is of: during its step its groups hold the rank's own parameters
only. Then each owner sends its parameters to the others, in buckets. Outside of a step groups are complete, so that
schedulers, clipping and the loop's own lines find what they know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

from nbtrain.compat import tensors
from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.kit.divided_state import as_bytes, held_by
from nbtrain.strategies.kit.divided_steps import PreparedDivided
from nbtrain.strategies.kit.gradient_average import AllReduce, AllReduceOptions, GradientAverage, norms_of
from nbtrain.strategies.kit.owned_tensors import dealt_out
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
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World

AHEAD = 3
"""so many buckets of parameters are under way"""
Parcels = list[tuple[int, list[torch.Tensor]]]
"""(owner, parameters that travel together)"""


class PreparedZero1(PreparedDivided):
    """A component whose parameters and gradients are whole on every rank."""

    averages_before_step = True

    def __init__(self, component: Component, bucket_mb: float, all_reduce: AllReduce) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        parameters = component.parameters()  # `sync` holds them, so that no new one can take over an id
        owners: dict[int, int] = {}
        for trained in (True, False):  # what is frozen may thaw one day
            some = [p for p in parameters if p.requires_grad is trained]
            dealt = dealt_out([p.numel() for p in some], self.world_size)
            owners |= {id(p): owner for p, owner in zip(some, dealt, strict=True)}
        self.capacity = int(bucket_mb * 2**20)
        self._plans: WeakKeyDictionary[Optimizer, tuple[list[int], Parcels]] = WeakKeyDictionary()
        norms = norms_of(component.modules.values())
        sync = GradientAverage(parameters, bucket_mb, norms, all_reduce)
        super().__init__(component, sync, "zero1", owners)
        if any(isinstance(optimizer, LBFGS) for optimizer in component.optimizers.values()):
            self.notes.append("LBFGS works on all parameters as one vector: its state is whole on every rank")

    def send(self, optimizer: Optimizer) -> None:
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

    def grow(self, component: Component) -> bool:
        """Optimizers and schedulers that came to the same modules."""
        return all(id(p) in self.owners for p in component.parameters()) and super().grow(component)


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
    """Bytes of what is sent after a step, in order (`PreparedZero1._parcels`)."""
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
    class Options(AllReduceOptions):
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
        return PreparedZero1(component, self.options.bucket_mb, AllReduce(self.options.comm_dtype))
