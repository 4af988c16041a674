"""What training a model takes: one forward, backward and step of it, with nothing behind the tensors but their shapes.

Torch's fake tensors go through the user's own code, so that whatever it does is counted as it does it. Models that
read numbers (`if loss.item() > 1`), or use code that knows nothing of such tensors, are run for real on one or two
samples, which is scaled up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import UsageError
from nbtrain.planning.profile_call import Call, find_call, find_loss
from nbtrain.planning.profile_model import bare, check, lent
from nbtrain.planning.profile_state import Stepped, step
from nbtrain.planning.profile_units import Units, places_of
from nbtrain.planning.tracing import CannotProfile, Memory, Timeline, size
from nbtrain.specs import PRECISIONS
from nbtrain.strategies.estimates import Moment, Profile, Unit, Weight
from nbtrain.training.precision import FORMATS, HALVES, Format, changed
from nbtrain.training.recompute import Recompute

__all__ = ["CannotProfile", "profile"]

Like = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Traced:
    """One forward and backward."""

    moments: list[Moment]
    units: tuple[Unit, ...]
    operations: float
    note: str


def profile(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    precision: str = "32",
    recompute: tuple[str, ...] = (),
    keyword: bool | None = None,
) -> Profile:
    """Of one step with this batch. The model, its optimizer and the random streams are left as they are.

    `recompute`: names of classes whose activations are computed again; `keyword`: whether a batch that is a dict is
    the model's arguments by name. Raises `CannotProfile` where the model cannot be run.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision {precision!r}: there are {', '.join(PRECISIONS)}")
    model = bare(model)
    check(model)
    call = find_call(model, batch, keyword)
    form = FORMATS.get(precision)
    notes = list(call.notes)
    with _shapes(form) as (mode, like, lowered):
        weights = {id(p): lowered(p) for p in model.parameters()}
        try:
            buffers = {id(b): lowered(b) for b in model.buffers()}
            with lent(model, weights | buffers, lambda t: t if t.device.type == "cpu" else like(t)), mode:
                traced = _trace(model, call.changed(like), form, recompute)
        except UsageError:
            raise
        except Exception as error:
            traced = _for_real(model, call, form, recompute, error)
            notes.append(f"it was measured for real on one sample, because {_named(error)}")
            with mode:
                for fake in weights.values():
                    fake.grad = torch.empty_like(fake) if fake.requires_grad else None
        with mode, torch.enable_grad():
            stepped = step(optimizer, weights, lambda t: lowered(t) if t.dim() else like(t))
    return _profile(model, weights, traced, stepped, call, precision, recompute, notes)


@contextmanager
def _shapes(form: Format | None) -> Iterator[tuple[Any, Like, Like]]:
    """Where tensors are only shapes; what makes such a tensor of a real one, and one in the precision of weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def made(real: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with mode, torch.device("cpu"):
            fake = torch.empty_strided(real.size(), real.stride(), dtype=dtype)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, real.requires_grad)
        return fake.requires_grad_(real.requires_grad)

    def lowered(real: torch.Tensor) -> torch.Tensor:
        lowers = form is not None and form.weights and real.is_floating_point() and real.element_size() > 1
        return made(real, form.dtype if lowers and form else real.dtype)

    yield mode, lambda real: made(real, real.dtype), lowered


def _trace(model: nn.Module, call: Call, form: Format | None, recompute: tuple[str, ...], real: bool = False) -> Traced:
    """One forward and backward of the model, with other tensors in the place of its own."""
    given = [*model.parameters(), *model.buffers()]
    call.changed(lambda tensor: given.append(tensor) or tensor)  # type: ignore[func-returns-value]
    memory = Memory(given, guarded=real)
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
    del output, loss
    return Traced(timeline.moments(), units.described(), memory.operations if memory.counted else 0.0, note)


def _forward(model: nn.Module, call: Call, form: Format | None) -> Any:
    """As `nbtrain.training.precision` does it on the ranks."""
    if form is None:
        return model(*call.given, **call.named)
    if not form.weights:
        kind = next(model.parameters()).device.type
        with torch.autocast(kind, dtype=form.dtype):
            output = model(*call.given, **call.named)
    else:
        low = call.changed(lambda tensor: tensor.to(form.dtype) if tensor.is_floating_point() else tensor)
        with _default(form):
            output = model(*low.given, **low.named)
    return changed(output, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)


@contextmanager
def _default(form: Format | None) -> Iterator[None]:
    """What a forward makes itself has to fit its weights."""
    before = torch.get_default_dtype()
    if form is not None and form.weights:
        torch.set_default_dtype(form.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _for_real(model: nn.Module, call: Call, form: Format | None, recompute: tuple[str, ...], why: Exception) -> Traced:
    """On one or two samples, and scaled up. Nothing of the model is written to but what is put back."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise CannotProfile(
            f"{type(model).__name__} has weights without content, so only its shapes can be looked at, and there "
            f"{_named(why)}"
        ) from why
    counts = [1, 2] if call.samples > 1 else [1]
    try:
        runs = [_run(model, call, n, form, recompute) for n in counts]
    except UsageError:
        raise
    except Exception:
        try:  # one sample is too little for a BatchNorm of a single pixel
            counts = [n for n in (2, 4) if n <= call.samples] or [call.samples]
            runs = [_run(model, call, n, form, recompute) for n in counts]
        except Exception as error:
            raise CannotProfile(f"{type(model).__name__} cannot be run with this batch: {_named(error)}") from error
    return _scaled(runs, counts, call.samples)


def _run(model: nn.Module, call: Call, samples: int, form: Format | None, recompute: tuple[str, ...]) -> Traced:
    device = next(model.parameters()).device
    lowers = form is not None and form.weights

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if lowers and form and tensor.is_floating_point():
            return tensor.detach().to(form.dtype)
        return tensor.detach()

    # The same memory, but hooks and gradients of its own.
    weights = {id(p): nn.Parameter(own(p), p.requires_grad) for p in model.parameters()}
    buffers = {id(b): own(b).clone() for b in model.buffers()}
    here = call.cut(samples).changed(lambda tensor: tensor.to(device))
    with lent(model, weights | buffers, lambda tensor: tensor):
        return _trace(model, here, form, recompute, real=True)


def _scaled(runs: list[Traced], counts: list[int], samples: int) -> Traced:
    """On a straight line through both runs."""
    first, last = runs[0], runs[-1]
    if len(runs) == 1 or len(first.moments) != len(last.moments):
        times = samples / counts[-1]

        def line(a: float, b: float) -> int:
            return round(b * times)
    else:

        def line(a: float, b: float) -> int:
            return max(round(a + (b - a) * (samples - counts[0]) / (counts[-1] - counts[0])), 0)

    moments = [
        Moment(line(a.activations, b.activations), b.gradients)
        for a, b in zip(first.moments if len(runs) > 1 else last.moments, last.moments, strict=False)
    ]
    units = tuple(
        Unit(path=b.path, kind=b.kind, activations=line(a.activations, b.activations), output=line(a.output, b.output))
        for a, b in zip(first.units, last.units, strict=True)
    )
    return Traced(moments, units, line(first.operations, last.operations), last.note)


def _named(error: BaseException) -> str:
    """What went wrong, in a part of a sentence."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _profile(
    model: nn.Module,
    weights: dict[int, torch.Tensor],
    traced: Traced,
    stepped: Stepped,
    call: Call,
    precision: str,
    recompute: tuple[str, ...],
    notes: list[str],
) -> Profile:
    places = places_of(model, traced.units)
    described = tuple(
        Weight(
            name=name,
            numel=p.numel(),
            bytes=size(weights[id(p)]),
            trains=p.requires_grad,
            state=stepped.state.get(id(p), 0),
            unit=places.get(id(p), -1),
        )
        for name, p in model.named_parameters()
    )
    return Profile(
        model=type(model).__name__,
        weights=described,
        units=traced.units,
        buffers=sum(map(size, model.buffers())),
        moments=tuple(traced.moments),
        step=stepped.step,
        step_together=stepped.step_together,
        optimizer=stepped.name,
        samples=call.samples,
        precision=precision,
        operations=traced.operations,
        recomputed=recompute,
        notes=(*notes, traced.note, *stepped.notes),
    )
