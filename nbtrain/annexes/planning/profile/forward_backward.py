"""Runs one forward and backward, and counts memory: of the whole, and what each unit keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtrain.annexes.planning.profile.memory_trace import LiveBytes, Timeline, size
from nbtrain.annexes.planning.profile.model_call import ModelCall, find_loss
from nbtrain.strategies.kit.call_arguments import all_tensors
from nbtrain.strategies.kit.units_to_wrap import find_units
from nbtrain.strategies.memory_estimate import Moment, Unit
from nbtrain.worker.precision.autocast import NumberFormat, changed, to_float32


@dataclass(slots=True)
class Traced:
    """What one forward and backward took."""

    moments: list[Moment]
    units: tuple[Unit, ...]
    notes: tuple[str, ...]
    watched: Sequence[Callable[[], Any]] = ()
    """weak references to tensors that existed at the end and must not outlive the profile"""


def trace(model: nn.Module, call: ModelCall, form: NumberFormat | None, real: bool = False) -> Traced:
    """Run the model and count. `real`: tensors have memory, so gradients are freed at once."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    given = [*model.parameters(), *model.buffers(), *(one for one in attributes if isinstance(one, torch.Tensor))]
    given += all_tensors((call.given, call.named, call.targets))
    memory = LiveBytes(given)
    units = UnitMemory(model, memory)
    timeline = Timeline(memory, model.parameters(), keeps=not real)
    try:
        with memory:
            output = _forward(model, call, form)
            units.end()
            loss, note = find_loss(output, call.targets)
            timeline.end()
            with form.default() if form is not None else nullcontext():
                loss.backward()
            timeline.end()
    finally:
        timeline.close()
        memory.undo()
    del output, loss  # until here, as in a loop that prints them
    return Traced(timeline.moments(), units.described(), (note,), memory.watched())


def _forward(model: nn.Module, call: ModelCall, form: NumberFormat | None) -> Any:
    """The forward in the given precision, as `nbtrain.worker.precision` does it on ranks."""
    if form is None:
        return model(*call.given, **call.named)
    if form.weights:
        low = call.changed(form.lower)
        with form.default():
            output = model(*low.given, **low.named)
    else:
        with torch.autocast(next(model.parameters()).device.type, dtype=form.dtype):
            output = model(*call.given, **call.named)
    return changed(output, to_float32)


# ---------------------------------------------------------------- units


class UnitMemory:
    """The units of one model. What an inner unit keeps does not count for the outer one."""

    def __init__(self, model: nn.Module, memory: LiveBytes) -> None:
        self._memory = memory
        self._found = find_units(model)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._kept: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._open: list[list[int]] = []
        """for each unit being called, outermost first: bytes alive before it, bytes that inner units keep"""
        self._closed = False
        for module in self._found:
            module.register_forward_pre_hook(self._begins, prepend=True)
            module.register_forward_hook(self._ends)

    def end(self) -> None:
        """The forward is over: calls from recomputation in the backward do not count."""
        self._closed = True

    def _begins(self, module: nn.Module, given: Any) -> None:
        if not self._closed:
            self._kept.setdefault(id(module), 0)
            self._open.append([self._memory.live, 0])

    def _ends(self, module: nn.Module, given: Any, returned: Any) -> None:
        if self._closed:
            return
        before, inner = self._open.pop()
        kept = self._memory.live - before
        self._kept[id(module)] += max(kept - inner, 0)
        self._outputs[id(module)] = sum(map(size, all_tensors(returned)))
        if self._open:
            self._open[-1][1] += kept

    def _ordered(self) -> list[nn.Module]:
        """Units in the order of their calls, then those without a call, the model itself last."""
        known = {id(module): module for module in self._found}
        root = self._found[-1]
        called = [known[key] for key in self._kept if known[key] is not root]
        return [*called, *(m for m in self._found if id(m) not in self._kept and m is not root), root]

    def described(self) -> tuple[Unit, ...]:
        return tuple(
            Unit(
                path=self._paths[id(module)],
                kind=type(module).__name__,
                activations=self._kept.get(id(module), 0),
                output=self._outputs.get(id(module), 0),
            )
            for module in self._ordered()
        )


def places_of(model: nn.Module, units: tuple[Unit, ...]) -> dict[int, int]:
    """For each weight, by its id, the number of the innermost unit that it is in."""
    order = {unit.path: i for i, unit in enumerate(units)}
    paths = {id(module): path for path, module in model.named_modules()}
    places: dict[int, int] = {}
    for module in find_units(model):
        for weight in module.parameters():
            places.setdefault(id(weight), order[paths[id(module)]])
    return places
