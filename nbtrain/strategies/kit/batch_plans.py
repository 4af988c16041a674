"""Whether a module gives for the parts of a batch what it gives for the whole: looked at once for each kind of call.

Cutting along the first dimension is right for most models, and silently wrong for some: where the batch is the second
dimension, where samples see each other, where what is returned is one number for all of them. So before a module is
called in parts for the first time, light copies of it compute the whole batch and the parts (in eval mode, so without
dropout and batch statistics; without gradients; of the module nothing changes), and the results are compared. A module
that does not pass is called with whole batches, which is always right.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nbtrain.compat.modules import call_hooks, parameters
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.batch_parts import Form, cut, flatten
from nbtrain.strategies.kit.module_replicas import replica

Mode = Literal["cat", "same"]
"""of a tensor that is returned: the parts' rows one after another; or the same whatever the part"""


@dataclass(frozen=True, slots=True)
class Plan:
    """For one kind of call of one module."""

    reason: str = ""
    """why it is not called in parts"""
    key: Any = None
    """of the form of what it returns. None: not known"""
    modes: tuple[Mode, ...] = ()

    def modes_for(
        self, key: Any, parts: Sequence[Sequence[torch.Size]], sizes: Sequence[int]
    ) -> tuple[Mode, ...] | None:
        """How parts that were returned in this form and of these shapes are put together. None: they cannot be."""
        if self.key == key:
            fit = all(
                len({shape[1:] for shape in shapes}) == 1 if mode == "cat" else len(set(shapes)) == 1
                for mode, shapes in zip(self.modes, zip(*parts, strict=True), strict=True)
            )
            return self.modes if fit else None
        # A training model returns something else than an evaluated one.
        for shapes in zip(*parts, strict=True):
            long = all(shape and shape[0] == size for shape, size in zip(shapes, sizes, strict=True))
            if not long or len({shape[1:] for shape in shapes}) > 1:
                return None
        return tuple("cat" for _ in parts[0])


def why_whole(module: nn.Module) -> str:
    """What can be said of a module before it is called."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            return "it has a part that torch.jit compiled"
        if any(is_lazy(p) for p in parameters(part).values() if p is not None):
            return LAZY
        for hook in call_hooks(part):
            if not str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                return f"{type(part).__name__} has a hook, which is to see whole batches"
    return ""


LAZY = "lazy"
"""it gets its shape with this call, and can be called in parts afterwards: nothing to be said"""


def examine(
    module: nn.Module, tensors: list[torch.Tensor], form: Form, batch: int, sizes: Sequence[int], moves: bool
) -> Plan:
    """`moves`: the generators of the devices are to stand afterwards where they stood (they may be CUDA's)."""
    with _nothing_happens(tensors, moves):
        held: list[tuple[nn.Module, nn.Module]] = []
        try:
            whole = _called(module, form, tensors, held)
        except (
            Exception
        ):  # it needs what there is not here (gradients, its training mode); or is about to say so itself
            return Plan()
        if (name := _attribute(held)) is not None:
            return Plan(f"its forward leaves a tensor in {name}, which would be one part's: return it instead")
        try:
            parts = [_called(module, form, part, held) for part in cut(tensors, batch, sizes)]
        except Exception as error:
            return Plan(
                f"it cannot take a part of a batch ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
            )
        key = whole[1]
        if any(part[1] != key for part in parts):
            return Plan("it returns something else for a part of a batch than for all of it")
        again: list[torch.Tensor] | None = None
        modes: list[Mode] = []
        for i, one in enumerate(whole[0]):
            mode = _mode(one, [part[0][i] for part in parts])
            if mode is None:
                again = _called(module, form, tensors, held)[0] if again is None else again
                if not _close(one, again[i]):  # it is drawn
                    mode = _mode(one, [part[0][i] for part in parts], by_shape=True)
            if mode is None and not one.dim():
                return Plan("it returns one number for the whole batch: return what it is made of, a row per sample")
            if mode is None:
                return Plan(
                    "what it returns for parts of a batch is not what it returns for all of it; is the batch its "
                    "second dimension, or do samples see each other?"
                )
            modes.append(mode)
        return Plan(key=key, modes=tuple(modes))


def _mode(whole: torch.Tensor, parts: Sequence[torch.Tensor], by_shape: bool = False) -> Mode | None:
    rows = whole.dim() > 0 and all(part.dim() == whole.dim() and part.shape[1:] == whole.shape[1:] for part in parts)
    if rows and sum(map(len, parts)) == len(whole) and (by_shape or _close(torch.cat(list(parts)), whole)):
        return "cat"
    if all(part.shape == whole.shape for part in parts) and not by_shape and all(_close(p, whole) for p in parts):
        return "same"
    return None


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    half = one.dtype in (torch.float16, torch.bfloat16)
    one, other = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other))
    blank = one.isfinite().logical_not()
    if not torch.equal(blank, other.isfinite().logical_not()):
        return False
    one, other = one.masked_fill(blank, 0), other.masked_fill(blank, 0)
    return bool((one - other).norm() <= (5e-2 if half else 1e-3) * other.norm() + 1e-7)


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each part has returned the same."""
    return all(_close(tensors[0], other) for other in tensors[1:])


def _called(
    module: nn.Module, form: Form, tensors: Sequence[torch.Tensor], held: list[tuple[nn.Module, nn.Module]]
) -> tuple[list[torch.Tensor], Any]:
    twin = replica(module, training=False)
    held[:] = zip(module.modules(), twin.modules(), strict=True)
    args, kwargs = form.rebuild(tensors)
    found, made = flatten(twin(*args, **kwargs))
    return found, made.key


def _attribute(held: Sequence[tuple[nn.Module, nn.Module]]) -> str | None:
    """Where the call has left a tensor."""
    for part, twin in held:
        before = vars(part)
        for name, value in vars(twin).items():
            if isinstance(value, torch.Tensor) and before.get(name) is not value:
                return f"self.{name} of {type(part).__name__}"
    return None


@contextmanager
def _nothing_happens(tensors: Sequence[torch.Tensor], cuda: bool) -> Iterator[None]:
    """No graph, no print, no random number; and no autocast, for the comparison."""
    kinds = {t.device.type for t in tensors} | {"cpu"}
    numpy: Any = sys.modules.get("numpy")
    state, drawn = random.getstate(), numpy.random.get_state() if numpy else None
    with contextlib.ExitStack() as around:
        around.enter_context(torch.random.fork_rng(enabled=True, devices=None if cuda else []))
        around.enter_context(torch.no_grad())
        for kind in kinds:
            if torch.amp.is_autocast_available(kind):
                around.enter_context(torch.autocast(kind, enabled=False))
        around.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            yield
        finally:
            random.setstate(state)
            if drawn is not None:
                numpy.random.set_state(drawn)
