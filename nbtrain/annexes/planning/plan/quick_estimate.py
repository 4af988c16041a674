"""Estimates memory without running the model: from weights, gradients and the optimizer's state alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.planning.plan import guide
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.plan import Plan, Planned
from nbtrain.annexes.planning.plan.plan_rows import candidates, planned
from nbtrain.annexes.planning.profile.forward_backward import places_of
from nbtrain.annexes.planning.profile.optimizer_state import step
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.units_to_wrap import find_units
from nbtrain.strategies.memory_estimate import Profile, Unit, Weight


def weighed(
    name: str, models: Sequence[nn.Module], parameters: Iterable[torch.Tensor], optimizers: Sequence[Optimizer],
    precision: str,
) -> Profile:  # fmt: skip
    """A profile without activations. `parameters`: each once, also those outside of the models; lazy ones, whose size
    the first batch decides, are left out."""
    held = [p for p in parameters if not is_lazy(p)]
    state: dict[int, int] = {}
    names: list[str] = []
    for optimizer in optimizers:
        stepped = step(optimizer, {id(p): p for p in held}, dense=True)
        names.append(stepped.name)
        for key, size in stepped.state.items():
            state[key] = state.get(key, 0) + size
    units, places = _units(models)
    weights = tuple(
        Weight(
            name=str(at),
            numel=p.numel(),
            bytes=p.nbytes,
            trains=p.requires_grad,
            state=state.get(id(p), 0),
            unit=places.get(id(p), -1),
        )
        for at, p in enumerate(held)
    )
    return Profile(
        model=name,
        weights=weights,
        units=units,
        buffers=0,
        moments=(),
        step=0,
        optimizer=", ".join(dict.fromkeys(names)),
        samples=0,
        precision=precision,
    )


def _units(models: Sequence[nn.Module]) -> tuple[tuple[Unit, ...], dict[int, int]]:
    """The units of all models, and for each weight (by its id) the number of its unit."""
    units: list[Unit] = []
    places: dict[int, int] = {}
    for model in models:
        paths = {id(module): path for path, module in model.named_modules()}
        own = tuple(
            Unit(path=paths[id(module)], kind=type(module).__name__, activations=0, output=0)
            for module in find_units(model)
        )
        places.update({key: at + len(units) for key, at in places_of(model, own).items()})
        units += own
    return tuple(units), places


def instead_of(name: str, profile: Profile, devices: DeviceMemory) -> tuple[Planned, Planned] | None:
    """The row of this strategy and the guide's first row that fits. None: this strategy fits, or none does."""
    known: Mapping[str, Planned] = {
        candidate.name: planned(candidate, profile, devices)
        for candidate in candidates({}, {}, devices.pool.nodes)
        if guide.place(candidate.name) is not None and candidate.name != "single" and not candidate.asks
    }
    row = known.get(name)
    if row is None or row.fits is not False:
        return None
    plan = Plan(profile=profile, devices=devices, rows=tuple(known.values()))
    best = plan.best()
    return None if best is None else (row, best)
