"""The notebook's statements in a script, with models prepared where their optimizers are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.errors import NotSupported
from nbtrain.export.needed_statements import Statement
from nbtrain.export.strategy_code import Form


class Made:
    """The models and optimizers that the statements make, as they are in the notebook."""

    def __init__(self, namespace: Mapping[str, Any], making: list[Statement], used: frozenset[str]) -> None:
        self.namespace = namespace
        names = bound(making) & (used | set().union(*(one.late for one in making), set()))
        found = {name: value for name, value in namespace.items() if name in names and isinstance(value, nn.Module)}
        inner = {id(part) for one in found.values() for part in one.modules() if part is not one}
        empty = {name for name, one in found.items() if next(one.parameters(), None) is None}
        self.models = [name for name, one in found.items() if id(one) not in inner and name not in empty]
        """those that are prepared: not a part of another one, not a loss"""
        self.losses = sorted(name for name in empty if next(found[name].buffers(), None) is not None)
        """without weights, but with numbers of their own"""
        self.optimizers = {
            name: value for name, value in namespace.items() if name in bound(making) and isinstance(value, Optimizer)
        }
        self._parameters = {name: set(map(id, found[name].parameters())) for name in self.models}

    def schedules_of(self, optimizer: str, names: frozenset[str]) -> list[str]:
        """Of these names, the schedules of this optimizer."""
        found = {name: self.namespace.get(name) for name in sorted(names)}
        own = self.optimizers[optimizer]
        return [name for name, one in found.items() if isinstance(one, LRScheduler) and one.optimizer is own]

    def without_model(self) -> list[str]:
        """Optimizers with parameters that are in none of the models."""
        held = set().union(*self._parameters.values(), set())
        return [
            name for name, one in self.optimizers.items()
            if any(id(p) not in held for group in one.param_groups for p in group["params"])
        ]  # fmt: skip

    def trained_by(self, optimizer: str) -> list[str]:
        """The models whose parameters it has."""
        held = {id(p) for group in self.optimizers[optimizer].param_groups for p in group["params"]}
        return [name for name in self.models if held & self._parameters[name]]


def definitions(
    rest: list[Statement], made: Made, form: Form, dtype: str, read: Callable[[set[str]], list[str]]
) -> list[str]:
    """`read`: lines that read what is saved beside the script, of these names."""
    lines: list[str] = []
    waiting = [name for name in made.models if name in bound(rest)]

    def prepare(which: set[str]) -> None:
        for name in [one for one in waiting if one in which]:
            own = [one for one in sorted(made.optimizers) if form.late and name in made.trained_by(one)]
            if dtype:
                lines.append(f"compute_in({name}, {dtype})")
            lines.append(f"{name} = prepared({', '.join([name, *own])})")
            waiting.remove(name)

    def ready(which: set[str], later: list[Statement]) -> None:
        """A model that is still changed is prepared after that: DistributedDataParallel notes what is frozen."""
        changed = set().union(*(one.changes for one in later), set())
        moved = [name for name in waiting if name in which & changed]
        lines.extend(line for name in moved if (line := f"{name}.to(DEVICE)") not in lines)
        if not form.late:
            prepare(which - changed)

    for at, one in enumerate(rest):
        lines += read(set(one.reads))
        optimizers = sorted(one.binds & made.optimizers.keys())
        if optimizers:
            ready(set(waiting) - bound(rest[at:]), rest[at:])
        lines.append(one.text)
        if optimizers:  # what the same statement has made
            ready(set(waiting) & one.binds - bound(rest[at + 1 :]), rest[at + 1 :])
        for name in optimizers if form.optimizer else ():
            models = made.trained_by(name)
            if form.engine and (len(models) != 1 or len([*filter(None, map(made.trained_by, made.optimizers))]) != 1):
                raise NotSupported("export: DeepSpeed's engine has one model and its optimizer: take -s fsdp")
            given = [*models, name] if form.engine else [name]
            taken = ", ".join(given)
            known = [] if form.engine else made.schedules_of(name, one.binds)
            lines.append(f"{taken} = {form.optimizer}({', '.join([*given, *known])})")
        lines += [f"{name}.to(DEVICE)" for name in made.losses if name in one.binds]
    prepare(set(waiting))
    return lines


def bound(rest: list[Statement]) -> set[str]:
    return set().union(*(one.binds for one in rest), set())
