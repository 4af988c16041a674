"""Cuts calls of a model along the batch. A strategy says who computes the parts and puts them together.

While a cell runs, each of the models has an attribute that `nn.Module.__call__` looks up, and nothing else: its class,
its methods and its hooks are the user's own. Only calls from outside are cut: what a model calls inside of itself has
a part of the batch already, and its own methods run as they stand.

What a call was given and what it returned is taken apart into tensors and the form around them (`Structure`), to be cut
and put together again. Looked into are tuples, lists, dicts, named tuples, dataclasses and what torch's pytree knows.

Whether a module gives for the parts of a batch what it gives for the whole is looked at once for each kind of call
(`CutPlan`). Cutting along the first dimension is right for most models, and silently wrong for some: where the batch is
the second dimension, where samples see each other, where what is returned is one number for all of them. So before a
module is called in parts for the first time, light copies of it compute the whole batch and the parts (in eval mode, so
without dropout and batch statistics; without gradients; of the module nothing changes), and the results are compared. A
module that does not pass is called with whole batches, which is always right.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal, TypeVar
from weakref import ref

import torch
from torch import nn

from nbtrain.base.errors import text_of
from nbtrain.compat import autograd_engine, tensors
from nbtrain.compat.layers import NormLayer, call_as_torch_does
from nbtrain.compat.modules import BUFFERS, CALL, call_hooks, named_parts, parameters
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.batch_structure import Structure, batch_of, cut, flatten, sizes_of
from nbtrain.strategies.kit.forward_reads import ReadCollector
from nbtrain.strategies.kit.module_replicas import replica

_cutting: dict[int, CutCalls] = {}
_inside: ContextVar[bool] = ContextVar("inside a call that is cut", default=False)

P = TypeVar("P")
Plain = Callable[[], Any]


@dataclass(slots=True, eq=False)
class CutCall:
    """One call of a model from outside."""

    module: nn.Module
    plain: Plain
    """the call as it stands"""
    tensors: list[torch.Tensor]
    """what it was given, with `form`"""
    form: Structure
    batch: int
    sizes: list[int]
    others: list[Any]
    """what it was given besides"""
    plan: CutPlan = field(default_factory=lambda: CutPlan())


class CutCalls:
    """Cuts the calls of a component's models along the batch. `on` while a cell runs."""

    def __init__(self, strategy: str, parts: int, run: Callable[[CutCall], Any], cuda: bool) -> None:
        """`run`: what happens instead of a call; its plan says whether it can be cut."""
        self.strategy = strategy
        self.parts = parts
        self.run = run
        self.cuda = cuda
        self.modules: list[nn.Module] = []
        self.plans: dict[Any, CutPlan] = {}
        self.inner: set[int] = set()
        """ids of modules that others call"""
        self.said: set[str] = set()

    def on(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if next(module.parameters(), None) is not None and CALL not in vars(module):
                vars(module)[CALL] = MethodType(_call_impl, module)
                _cutting[id(module)] = self
                self.modules.append(module)

    def off(self) -> None:
        for module in self.modules:
            vars(module).pop(CALL, None)
            _cutting.pop(id(module), None)
        self.modules.clear()
        self.plans.clear()
        self.inner.clear()
        self.said.clear()

    def release_modules(self, owner: P) -> Callable[[], P]:
        """Hold no module until what is returned is called, which gives the owner back. Nothing that was known of those
        that are gone by then is taken for another one's, which may lie in the same place."""
        references = [(id(module), ref(module)) for module in self.modules]
        self.modules.clear()

        def again() -> P:
            modules = [(number, alive()) for number, alive in references]
            self.modules += [module for _, module in modules if module is not None]
            gone = {number for number, module in modules if module is None}
            for number in gone:
                _cutting.pop(number, None)
            self.plans = {key: plan for key, plan in self.plans.items() if key[0] not in gone}
            if gone:
                self.inner.clear()  # parts of theirs may be among these; a call tells again
            return owner

        return again

    def called(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others: list[Any] = []
        tensors, form = flatten((args, kwargs), others)
        batch = batch_of(tensors)
        call = CutCall(module, plain, tensors, form, batch, sizes_of(batch, self.parts), others)
        call.plan = self._plan(call)
        return self.run(call)

    def give_up(self, call: CutCall) -> None:
        """What was returned for the parts could not be put together."""
        reason = "what it returned for the parts of a batch could not be put together"
        self.plans[_kind(call)] = self.plans[_form_of(call)] = call.plan = CutPlan(reason)
        self._say(call.module, reason)

    def _plan(self, call: CutCall) -> CutPlan:
        if len(call.sizes) < 2:
            return CutPlan("there is nothing to cut")
        if call.module.training and not torch.is_grad_enabled() and _counts(call.module):
            return CutPlan("it collects statistics, as `update_bn` does")
        # Computed again in a backward, it is cut as it was: its module may stand elsewhere by now.
        key = _form_of(call) if autograd_engine.in_backward() else _kind(call)
        plan = self.plans.get(key)
        if plan is None:
            reason = why_whole(call.module)
            if reason == LAZY:
                return CutPlan(reason)
            if reason:
                plan = CutPlan(reason)
            else:
                plan = examine(call.module, call.tensors, call.form, call.batch, call.sizes, self.cuda)
            self.plans[key] = plan
            if plan.reason:
                self._say(call.module, plan.reason)
        self.plans[_form_of(call)] = plan
        return plan

    def _say(self, module: nn.Module, reason: str) -> None:
        text = (
            f"{type(module).__name__} is called with whole batches, which is right but no faster than "
            f"--strategy single: {reason}"
        )
        if text not in self.said:
            self.said.add(text)
            warnings.warn(f"{self.strategy}: {text}", stacklevel=2)


def _counts(module: nn.Module) -> bool:
    return any(isinstance(part, NormLayer) and part.track_running_stats for part in module.modules())


def _form_of(call: CutCall) -> Any:
    long = tuple(bool(t.dim()) and len(t) == call.batch for t in call.tensors)
    return id(call.module), call.module.training, call.form.key, long


def _kind(call: CutCall) -> Any:
    """Calls of one kind look at their batch in the same way: what a forward does may depend on all that it is given, on
    what its code reads, and on buffers."""
    numbers = [t.item() for t in call.tensors if t.dim() == 0]
    parts = [part for _, part in named_parts(call.module)]
    reads = ReadCollector(part for part in parts if not type(part).__module__.startswith("torch."))
    given = [reads.value(other, 0) for other in call.others]
    # Norm layers write to theirs in every call, and nothing is decided by these.
    written = [
        tensors.version(buffer)
        for part in parts if not isinstance(part, NormLayer)
        for buffer in vars(part)[BUFFERS].values() if buffer is not None
    ]  # fmt: skip
    return (*_form_of(call), *numbers, *given, *reads.found, *[part.training for part in parts], *written)


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    calls = _cutting.get(id(self))  # a copy of the model has none
    if calls is None or torch.compiler.is_compiling():
        return call_as_torch_does(self, *args, **kwargs)
    if _inside.get():
        calls.inner.add(id(self))
        return call_as_torch_does(self, *args, **kwargs)
    again = autograd_engine.in_backward()  # which computes it again, as it was the first time
    vmapped = autograd_engine.in_functional_transform()  # the batch is not to be seen
    if vmapped or (again and id(self) in calls.inner):
        return call_as_torch_does(self, *args, **kwargs)
    token = _inside.set(True)
    try:
        return calls.called(self, lambda: call_as_torch_does(self, *args, **kwargs), args, kwargs)
    finally:
        _inside.reset(token)


Mode = Literal["cat", "same"]
"""of a tensor that is returned: the parts' rows one after another; or the same whatever the part"""


@dataclass(frozen=True, slots=True)
class CutPlan:
    """How one kind of call of one module is cut."""

    reason: str = ""
    """why it is not called in parts"""
    key: Any = None
    """key of the form of what it returns. None: not known"""
    modes: tuple[Mode, ...] = ()

    def modes_for(
        self, key: Any, parts: Sequence[Sequence[torch.Size]], sizes: Sequence[int]
    ) -> tuple[Mode, ...] | None:
        """How parts of this form and these shapes are put together; None where they cannot be."""
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
    """The reason to call a module with whole batches that is known before it is called; empty if there is none."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            return "it has a part that torch.jit compiled"
        if any(is_lazy(p) for p in parameters(part).values() if p is not None):
            return LAZY
        for hook in call_hooks(part):
            if not str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                return f"{type(part).__name__} has a hook, which must see whole batches"
    return ""


LAZY = "lazy"
"""it gets its shape with this call, and can be called in parts afterwards: nothing to be said"""


def examine(
    module: nn.Module, tensors: list[torch.Tensor], form: Structure, batch: int, sizes: Sequence[int], moves: bool
) -> CutPlan:
    """`moves`: the generators of the devices are to stand afterwards where they stood (they may be CUDA's)."""
    with nothing_happens(tensors, moves):
        modules: list[tuple[nn.Module, nn.Module]] = []
        try:
            full_call = _called(module, form, tensors, modules)
        except Exception:  # it needs gradients or its training mode; or is about to say so itself
            return CutPlan()
        if (name := _attribute(modules)) is not None:
            return CutPlan(f"its forward leaves a tensor in {name}, which would be one part's: return it instead")
        try:
            parts = [_called(module, form, part, modules) for part in cut(tensors, batch, sizes)]
        except Exception as error:  # of the user's model, and what it raises is said
            said = text_of(error).partition("\n")[0][:200]
            return CutPlan(f"it cannot take a part of a batch ({type(error).__name__}: {said})")
        key = full_call[1]
        if any(part[1] != key for part in parts):
            return CutPlan("it returns something else for a part of a batch than for all of it")
        again: list[torch.Tensor] | None = None
        modes: list[Mode] = []
        for i, output in enumerate(full_call[0]):
            mode = _mode(output, [part[0][i] for part in parts])
            if mode is None:
                again = _called(module, form, tensors, modules)[0] if again is None else again
                if not _close(output, again[i]):  # it is drawn
                    mode = _mode(output, [part[0][i] for part in parts], by_shape=True)
            if mode is None and not output.dim():
                return CutPlan("it returns one number for the whole batch: return what it is made of, a row per sample")
            if mode is None:
                return CutPlan(
                    "what it returns for parts of a batch is not what it returns for all of it; is the batch its "
                    "second dimension, or do samples see each other?"
                )
            modes.append(mode)
        return CutPlan(key=key, modes=tuple(modes))


def _mode(full: torch.Tensor, parts: Sequence[torch.Tensor], by_shape: bool = False) -> Mode | None:
    rows = full.dim() > 0 and all(part.dim() == full.dim() and part.shape[1:] == full.shape[1:] for part in parts)
    if rows and sum(map(len, parts)) == len(full) and (by_shape or _close(torch.cat(list(parts)), full)):
        return "cat"
    if all(part.shape == full.shape for part in parts) and not by_shape and all(_close(p, full) for p in parts):
        return "same"
    return None


def _close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, other)
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    tensor, other = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (tensor, other))
    blank = tensor.isfinite().logical_not()
    if not torch.equal(blank, other.isfinite().logical_not()):
        return False
    tensor, other = tensor.masked_fill(blank, 0), other.masked_fill(blank, 0)
    return bool((tensor - other).norm() <= (5e-2 if half else 1e-3) * other.norm() + 1e-7)


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors are equal, but for rounding."""
    return all(_close(tensors[0], other) for other in tensors[1:])


def _called(
    module: nn.Module, form: Structure, tensors: Sequence[torch.Tensor], pairs: list[tuple[nn.Module, nn.Module]]
) -> tuple[list[torch.Tensor], Any]:
    twin = replica(module, training=False)
    pairs[:] = zip(module.modules(), twin.modules(), strict=True)
    args, kwargs = form.rebuild(tensors)
    tensors_out, made = flatten(twin(*args, **kwargs))
    return tensors_out, made.key


def _attribute(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> str | None:
    """The attribute in which the call has left a tensor, in words."""
    for part, twin in pairs:
        before = vars(part)
        for name, value in vars(twin).items():
            if isinstance(value, torch.Tensor) and before.get(name) is not value:
                return f"self.{name} of {type(part).__name__}"
    return None


@contextmanager
def nothing_happens(tensors: Sequence[torch.Tensor], cuda: bool) -> Iterator[None]:
    """Inside, a call leaves no graph, no output and no drawn number. Without autocast, for the comparison."""
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
