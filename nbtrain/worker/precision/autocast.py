"""`--precision`: runs models in 16 bits.

mixed: the outermost call of a model runs under autocast and returns 32 bits, so that losses, optimizers and whatever
    else a loop does stay in 32. Weights are not touched. (`16-mixed` also scales the loss: see loss_scaling.py.)
true: weights, buffers and optimizer states are in 16 bits on the ranks; what a model is given is cast, and what it
    returns is cast back. The notebook's tensors stay as they are: see low_precision_weights.py.

`nn.Module.__call__` is replaced while the runtime is installed, rather than hooks put on the modules: a copy of the
model that the cell makes, pickles or sends home has nothing of it, whatever the cell makes is covered, and an inner
module costs one more call. Only calls from outside count as outermost, so that `model.encode(x)`, which calls layers
and not the model, is covered too. A module without parameters (a loss) computes in 32 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PRECISIONS
from nbtrain.compat import autograd_engine, pytree
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Strategy
from nbtrain.worker.parts import Cell, Part

if TYPE_CHECKING:
    from nbtrain.worker.precision.loss_scaling import LossScaling


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """What a precision other than 32 means."""

    dtype: torch.dtype
    weights: bool = False
    """weights are kept in it, too"""
    scaled: bool = False
    """the loss is scaled, as the range of this dtype is too small for gradients"""

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def default(self) -> Iterator[None]:
        """Inside, what a forward makes itself (zeros for a state) has the dtype of the weights."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype if self.weights else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


NUMBER_FORMATS: Mapping[str, NumberFormat] = {
    "bf16-mixed": NumberFormat(torch.bfloat16),
    "16-mixed": NumberFormat(torch.float16, scaled=True),
    "bf16-true": NumberFormat(torch.bfloat16, weights=True),
    "16-true": NumberFormat(torch.float16, weights=True),
}
HALVES = (torch.float16, torch.bfloat16)


def chosen(precision: str, strategy: Strategy, device: torch.device) -> NumberFormat | None:
    """The format, or None where there is nothing to do around the strategy. Raises where it is not possible."""
    if precision == PRECISIONS[0]:
        return None
    if precision not in NUMBER_FORMATS:
        raise UsageError(f"precision {precision!r}: there are {', '.join(PRECISIONS)}")
    if strategy.facts.hands_off:
        raise UsageError(
            f"--precision {precision}: under this strategy nothing is touched, so the code says itself what it "
            "computes in; take another strategy, or leave the option out"
        )
    form = NUMBER_FORMATS[precision]
    if device.type == "cuda" and form.dtype is torch.bfloat16 and not _has_bfloat16(device):
        card = torch.cuda.get_device_name(device)
        instead = precision.replace("bf16", "16")
        raise UsageError(f"--precision {precision}: {card} does not compute in bfloat16; take --precision {instead}")
    if not (form.weights or strategy.facts.own_precision) and not torch.amp.is_autocast_available(device.type):
        raise UsageError(f"--precision {precision}: torch has no autocast for {device.type}; leave the option out")
    return None if strategy.facts.own_precision else form


def _has_bfloat16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


_inside: ContextVar[bool] = ContextVar("inside of a model that is being called", default=False)
"""Also set in threads in which a strategy computes a part of the call: they copy the caller's context."""


class Forwards(Part):
    """Wraps the outermost call of each model while a cell runs."""

    def __init__(self, form: NumberFormat, device: torch.device, scaling: LossScaling | None) -> None:
        self.form = form
        self.kind = device.type
        self.scaling = scaling
        self.on = False

    def begin(self, cell: Cell) -> None:
        self.on = True

    def end(self, ok: bool) -> None:
        self.on = False

    def listen(self, listeners: Listeners) -> None:
        listeners.listen("torch.nn.Module.__call__", "precision", self._call)
        if self.form.weights:
            listeners.listen("torch.autograd.backward", "precision", self._backward)

    def _call(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.on or _inside.get():
                return old(module, *args, **kwargs)
            first = next(module.parameters(), None)
            if first is None or (self.form.weights and first.dtype is not self.form.dtype):
                return old(module, *args, **kwargs)
            token = _inside.set(True)
            try:
                if autograd_engine.in_backward() and self._was_inside(args, kwargs):
                    return old(module, *args, **kwargs)
                if self.form.weights:
                    with self.form.default():
                        returned = old(module, *changed(args, self.form.lower), **changed(kwargs, self.form.lower))
                    return changed(returned, to_float32)
                if self.scaling is not None:
                    self.scaling.before_model(module)
                with torch.autocast(self.kind, dtype=self.form.dtype):
                    returned = old(module, *args, **kwargs)
                returned = changed(returned, to_float32)
                if self.scaling is not None:
                    self.scaling.after_model((args, kwargs), returned)
                return returned
            finally:
                _inside.reset(token)

        return call

    def _was_inside(self, args: Any, kwargs: Any) -> bool:
        """Whether a layer that a backward computes again was inside of a model the first time."""
        if not self.form.weights:  # torch's checkpoint has put back the autocast there was
            return torch.is_autocast_enabled(self.kind)
        given = args, kwargs
        return changed(given, self.form.lower) is given

    def _backward(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Layers that a backward computes again make their own tensors once more."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return old(*args, **kwargs)
            with self.form.default():
                return old(*args, **kwargs)

        return backward


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed: the very same object where none of them was. Looks into containers, dataclasses
    and what torch's pytree knows."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        parts = [changed(part, change) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        if pytree.is_named_tuple(value):
            return type(value)(*parts)
        return type(value)(parts) if isinstance(value, tuple) or type(value) is list else value
    if type(value) is dict:
        pairs = {key: changed(part, change) for key, part in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    if pytree.is_container(type(value)):
        return pytree.tree_map(lambda leaf: changed(leaf, change), value)
    if is_dataclass(value) and not isinstance(value, type):
        return _changed_fields(value, change)
    return value


def _changed_fields(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    found = value
    for field in fields(value):
        old = getattr(value, field.name, None)
        new = changed(old, change)
        if new is not old:
            found = copy.copy(value) if found is value else found
            object.__setattr__(found, field.name, new)  # it may be frozen
    return found
