"""Runs a model that fake tensors cannot go through for real, on two samples and on four, and scales the result up.

The run uses the memory of the model's own weights, so a large model is not copied; what it writes to is restored.
Gradients are freed as soon as they are complete.
"""

from __future__ import annotations

import torch
from torch import nn

from nbtrain.annexes.planning.profile.forward_backward import Traced, trace
from nbtrain.annexes.planning.profile.lend_model import stand_ins
from nbtrain.annexes.planning.profile.memory_trace import CannotProfile
from nbtrain.annexes.planning.profile.model_call import ModelCall
from nbtrain.base.errors import UsageError
from nbtrain.compat import fake_tensors
from nbtrain.strategies.memory_estimate import Moment, Unit
from nbtrain.worker.precision.autocast import NumberFormat


def run_for_real(model: nn.Module, call: ModelCall, form: NumberFormat | None, why: Exception) -> Traced:
    """Measured on a few samples. `why`: the error with fake tensors. Raises `CannotProfile` if this fails too."""
    name = type(model).__name__
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CannotProfile(f"{name} has only shapes, no values, and {_because(why)}") from why
    counts = sorted({min(2, call.samples), min(4, call.samples)})  # one sample is too few for a BatchNorm
    try:
        runs = [_run(model, call, count, form) for count in counts]
    except UsageError:
        raise
    except Exception as error:
        # If shapes do not fit, report those of the whole batch rather than of its first samples.
        told = error if fake_tensors.is_of_shapes(why) else why
        raise CannotProfile(f"{name} cannot be run with this batch: {_named(told)}") from error
    traced = _scaled(runs, counts, call.samples)
    samples = "one sample" if counts[0] == 1 else f"{counts[0]} samples"
    traced.notes = (f"measured on {samples} and scaled up, because {_because(why)}", *traced.notes)
    return traced


def _run(model: nn.Module, call: ModelCall, samples: int, form: NumberFormat | None) -> Traced:
    device = next(model.parameters()).device

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if form is not None and form.weights and tensor.is_floating_point():
            return tensor.detach().to(form.dtype)
        return tensor.detach()

    # New parameters on the same memory, with hooks and gradients of their own.
    weights = {id(p): nn.Parameter(own(p), p.requires_grad) for p in model.parameters()}
    buffers = {id(b): own(b).clone() for b in model.buffers()}
    here = call.cut(samples).changed(lambda tensor: tensor.detach().to(device))
    with stand_ins(model, weights | buffers, lambda tensor: tensor):
        return trace(model, here, form, real=True)


def _scaled(runs: list[Traced], counts: list[int], samples: int) -> Traced:
    """Extrapolated to the whole batch on a straight line through both runs."""
    first, last = runs[0], runs[-1]
    straight = len(runs) == 2 and len(first.moments) == len(last.moments)

    def line(a: float, b: float) -> int:
        if not straight:
            return round(b * samples / counts[-1])
        return max(round(a + (b - a) * (samples - counts[0]) / (counts[1] - counts[0])), 0)

    pairs = zip(first.moments if straight else last.moments, last.moments, strict=True)
    moments = [Moment(line(a.activations, b.activations), b.gradients) for a, b in pairs]
    units = tuple(
        Unit(path=b.path, kind=b.kind, activations=line(a.activations, b.activations), output=line(a.output, b.output))
        for a, b in zip(first.units, last.units, strict=True)
    )
    return Traced(moments, units, last.notes)


def _because(error: Exception) -> str:
    if fake_tensors.wants_numbers(error):
        return f"its forward reads values ({str(error).removeprefix('aten.').split('.')[0].lstrip('_')})"
    return f"shapes alone are not enough for it ({_named(error)})"


def _named(error: BaseException) -> str:
    """The error as part of a sentence."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
