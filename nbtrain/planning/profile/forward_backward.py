"""Runs one forward and backward while `nbtrain.planning.profile.memory_trace` counts memory and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtrain.planning.profile.memory_trace import LiveBytes, Timeline
from nbtrain.planning.profile.model_call import ModelCall, find_loss
from nbtrain.planning.profile.unit_memory import UnitMemory
from nbtrain.strategies.memory_estimate import Moment, Unit
from nbtrain.training.precision.activation_checkpointing import ActivationCheckpointing
from nbtrain.training.precision.autocast import HALVES, Format, changed


@dataclass(slots=True)
class Traced:
    """What one forward and backward took."""

    moments: list[Moment]
    units: tuple[Unit, ...]
    operations: float
    notes: tuple[str, ...]
    watched: Sequence[Callable[[], Any]] = ()
    """weak references to tensors that existed at the end and must not outlive the profile"""


def trace(
    model: nn.Module, call: ModelCall, form: Format | None, recompute: tuple[str, ...], real: bool = False
) -> Traced:
    """Run the model and count. `real`: tensors have memory, so gradients are freed at once."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    given = [*model.parameters(), *model.buffers(), *(one for one in attributes if isinstance(one, torch.Tensor))]
    call.changed(lambda tensor: given.append(tensor) or tensor)  # type: ignore[func-returns-value]
    memory = LiveBytes(given)
    units = UnitMemory(model, memory)
    again = ActivationCheckpointing()
    again.begin(recompute, [model])
    timeline = Timeline(memory, model.parameters(), keeps=not real)
    again.on()
    try:
        with memory:
            output = _forward(model, call, form)
            units.end()
            loss, note = find_loss(output, call.targets)
            timeline.end()
            with _default(form):
                loss.backward()
            timeline.end()
    finally:
        again.off()
        timeline.close()
        memory.undo()
    del output, loss  # until here, as in a loop that prints them
    operations = memory.operations if memory.counted else 0.0
    return Traced(timeline.moments(), units.described(), operations, (note,), memory.watched())


def _forward(model: nn.Module, call: ModelCall, form: Format | None) -> Any:
    """The forward in the given precision, as `nbtrain.training.precision` does it on ranks."""
    if form is None:
        return model(*call.given, **call.named)
    if form.weights:
        low = call.changed(lambda tensor: tensor.to(form.dtype) if tensor.is_floating_point() else tensor)
        with _default(form):
            output = model(*low.given, **low.named)
    else:
        with torch.autocast(next(model.parameters()).device.type, dtype=form.dtype):
            output = model(*call.given, **call.named)
    return changed(output, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)


@contextmanager
def _default(form: Format | None) -> Iterator[None]:
    """Tensors that a forward makes get the dtype of its weights."""
    if form is None or not form.weights:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(form.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
