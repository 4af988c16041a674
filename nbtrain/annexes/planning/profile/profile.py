"""Profiles one forward, backward and optimizer step of a model on fake tensors, which have a shape and no content.

Fake tensors run through the user's own code, so everything it allocates is counted. Models that read numbers
(`if loss.item() > 1`), or use code that cannot take fake tensors, run for real on two samples and on four.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.planning.profile.forward_backward import Traced, places_of, trace
from nbtrain.annexes.planning.profile.left_in_caches import FakeTensorCleanup
from nbtrain.annexes.planning.profile.lend_model import refuse_unprofilable, stand_ins, unwrapped
from nbtrain.annexes.planning.profile.memory_trace import CannotProfile, size
from nbtrain.annexes.planning.profile.model_call import ModelCall, find_call
from nbtrain.annexes.planning.profile.optimizer_state import OptimizerStep, step
from nbtrain.annexes.planning.profile.real_run import run_for_real
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PRECISIONS
from nbtrain.compat.fake_tensors import FakeTensorMode, quiet
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.units_to_wrap import find_units
from nbtrain.strategies.memory_estimate import Profile, Unit, Weight
from nbtrain.worker.precision.autocast import NUMBER_FORMATS, NumberFormat

__all__ = ["CannotProfile", "profile"]


def profile(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    precision: str = "32",
) -> Profile:
    """The profile of one step with this batch. Model, optimizer and random states stay as they are. Raises
    `CannotProfile` if the model cannot run."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision {precision!r}: there are {', '.join(PRECISIONS)}")
    model = unwrapped(model)
    refuse_unprofilable(model)
    call = find_call(model, batch)
    form = NUMBER_FORMATS.get(precision)
    shapes = Shapes(form)
    cleanup = FakeTensorCleanup(shapes.mode)
    try:
        with cleanup:
            measured = _on_shapes(model, call, shapes, optimizer, cleanup)
    except UsageError:
        raise
    except Exception as error:  # of the model's code: it is run for real then
        traced = run_for_real(model, call, form, error)
        weights = {id(p): shapes.lowered(p) for p in model.parameters()}
        measured = _stepped(traced, weights, optimizer, dense=True)  # the gradients of the real run are gone
    traced, stepped = measured.traced, measured.stepped
    places = places_of(model, traced.units)
    return Profile(
        model=type(model).__name__,
        weights=tuple(
            Weight(
                name=name,
                numel=p.numel(),
                bytes=measured.sizes[id(p)],
                trains=p.requires_grad,
                state=stepped.state.get(id(p), 0),
                unit=places.get(id(p), -1),
            )
            for name, p in model.named_parameters()
        ),
        units=traced.units,
        buffers=sum(size(shapes.lowered(b)) for b in model.buffers()),
        moments=tuple(traced.moments),
        step=stepped.step,
        step_together=stepped.step_together,
        optimizer=stepped.name,
        samples=call.samples,
        precision=precision,
        notes=(*call.notes, *traced.notes, *stepped.notes, *cleanup.notes()),
    )


def without_activations(models: Iterable[nn.Module], optimizers: Sequence[Optimizer], precision: str) -> Profile:
    """Of weights, gradients and the optimizers' state alone: no model is run. Sizes of lazy layers are not known."""
    roots = list(models)
    units = [unit for root in roots for unit in find_units(root)]
    parameters = [p for root in roots for p in root.parameters()]
    parameters += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    weights = {id(p): p for p in parameters if not is_lazy(p)}
    steps = [step(optimizer, weights, dense=True) for optimizer in optimizers]
    state: Counter[int] = sum((Counter(one.state) for one in steps), Counter())
    unit = {id(p): at for at in reversed(range(len(units))) for p in units[at].parameters()}  # inner units come first
    return Profile(
        weights=tuple(
            Weight(name="", numel=p.numel(), bytes=p.nbytes, trains=p.requires_grad, state=state[key],
                   unit=unit.get(key, -1)) for key, p in weights.items()
        ),
        units=tuple(Unit(path="" if one in roots else "part", kind=type(one).__name__, activations=0, output=0)
                    for one in units),
        model="", buffers=0, moments=(), step=0, optimizer=", ".join(dict.fromkeys(one.name for one in steps)),
        samples=0, precision=precision,
    )  # fmt: skip


class Shapes:
    """Makes fake tensors for real ones, all of them on the CPU."""

    def __init__(self, form: NumberFormat | None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.form = form

    def like(self, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        with torch.inference_mode(False), self.mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=dtype or real.dtype, device="cpu")
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, real.requires_grad)
        return fake.requires_grad_(real.requires_grad)

    def lowered(self, real: torch.Tensor) -> torch.Tensor:
        """The same in the precision that weights have."""
        lowers = self.form is not None and self.form.weights and real.is_floating_point() and real.element_size() > 1
        return self.like(real, self.form.dtype if lowers and self.form else None)


@dataclass(slots=True)
class _Measured:
    """What the forward, backward and step gave, with the size of each weight."""

    traced: Traced
    stepped: OptimizerStep
    sizes: dict[int, int]
    """bytes by the weight's id"""


def _on_shapes(
    model: nn.Module,
    call: ModelCall,
    shapes: Shapes,
    optimizer: Optimizer | None,
    cleanup: FakeTensorCleanup,
) -> _Measured:
    """Run on fake tensors. None of them outlives the call."""
    weights = {id(p): shapes.lowered(p) for p in model.parameters()}
    others = weights | {id(b): shapes.lowered(b) for b in model.buffers()}
    given = call.changed(shapes.like)

    def attribute(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == "cpu" else shapes.like(tensor)

    # The forward makes its own tensors on torch's default device, and all fake ones are on the CPU.
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        quiet(),
        stand_ins(model, others, attribute),
        torch.device("cpu") if elsewhere else nullcontext(),
        shapes.mode,
    ):
        traced = trace(model, given, shapes.form)
    cleanup.watch(traced.watched)
    return _stepped(traced, weights, optimizer)


def _stepped(
    traced: Traced, weights: dict[int, torch.Tensor], optimizer: Optimizer | None, dense: bool = False
) -> _Measured:
    with torch.inference_mode(False), torch.enable_grad():
        stepped = step(optimizer, weights, dense)
    return _Measured(traced, stepped, {key: size(fake) for key, fake in weights.items()})
