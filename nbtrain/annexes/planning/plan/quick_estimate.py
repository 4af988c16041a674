"""Estimates memory without running the model: from weights, gradients and the optimizer's state alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.planning.plan import guide
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.plan import Plan, Planned
from nbtrain.annexes.planning.plan.plan_rows import candidates, planned
from nbtrain.annexes.planning.profile.optimizer_state import step
from nbtrain.strategies.kit.units_to_wrap import find_units
from nbtrain.strategies.memory_estimate import Profile, Unit, Weight


def instead_of_ddp(
    models: Iterable[nn.Module],
    weights: Collection[torch.Tensor],
    optimizers: Iterable[Optimizer],
    devices: DeviceMemory,
) -> tuple[Planned, Planned] | None:
    """The row of ddp and the guide's first row that fits. None: ddp fits, or nothing does. `weights`: each once, also
    those outside of the models."""
    profile = _weighed(models, weights, optimizers, devices.precision)
    rows = {
        candidate.name: planned(candidate, profile, devices)
        for candidate in candidates({}, {}, devices.pool.nodes)
        if guide.place(candidate.name) is not None and candidate.name != "single"
    }
    best = Plan(profile=profile, devices=devices, rows=tuple(rows.values())).best()
    return (rows["ddp"], best) if best is not None and rows["ddp"].fits is False else None


def _weighed(
    models: Iterable[nn.Module], weights: Collection[torch.Tensor], optimizers: Iterable[Optimizer], precision: str
) -> Profile:
    """A profile without activations."""
    real = {id(p): p for p in weights}
    steps = [step(optimizer, real, dense=True) for optimizer in optimizers]
    state = sum((Counter(one.state) for one in steps), Counter[int]())
    units: list[Unit] = []
    places: dict[int, int] = {}
    for model in models:
        for module in find_units(model):
            places = {id(p): len(units) for p in module.parameters()} | places  # inner units come first
            path = "" if module is model else "part"
            units.append(Unit(path=path, kind=type(module).__name__, activations=0, output=0))
    return Profile(
        model="",
        weights=tuple(
            Weight(
                name="",
                numel=p.numel(),
                bytes=p.nbytes,
                trains=p.requires_grad,
                state=state[key],
                unit=places.get(key, -1),
            )
            for key, p in real.items()
        ),
        units=tuple(units),
        buffers=0,
        moments=(),
        step=0,
        optimizer=", ".join(dict.fromkeys(one.name for one in steps)),
        samples=0,
        precision=precision,
    )
