"""One forward and backward of a model that has been lent, looked at: `nbtrain.planning.profile.trace` counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtrain.planning.profile.model_call import ModelCall, find_loss
from nbtrain.planning.profile.trace import LiveBytes, Timeline
from nbtrain.planning.profile.units import Units
from nbtrain.strategies.estimates import Moment, Unit
from nbtrain.training.precision.activation_checkpointing import Recompute
from nbtrain.training.precision.autocast import HALVES, Format, changed


@dataclass(slots=True)
class Traced:
    """What was seen."""

    moments: list[Moment]
    units: tuple[Unit, ...]
    operations: float
    notes: tuple[str, ...]
    watched: Sequence[Callable[[], Any]] = ()
    """weak references to what there was at the end; nothing of it is to stay"""


def trace(
    model: nn.Module, call: ModelCall, form: Format | None, recompute: tuple[str, ...], real: bool = False
) -> Traced:
    """`real`: there is memory behind what is computed, so that gradients are let go of."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    given = [*model.parameters(), *model.buffers(), *(one for one in attributes if isinstance(one, torch.Tensor))]
    call.changed(lambda tensor: given.append(tensor) or tensor)  # type: ignore[func-returns-value]
    memory = LiveBytes(given)
    units = Units(model, memory)
    again = Recompute()
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
    """As `nbtrain.training.precision.autocast` does it on the ranks."""
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
    """What a forward makes itself has to fit its weights."""
    if form is None or not form.weights:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(form.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
