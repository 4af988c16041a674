"""What a model's own forward does, written down: which parts it calls, and what it does between them.

It is run once for each form of what it is given, on tensors without numbers, so that nothing is computed, drawn or
communicated, and every rank writes down the same. Parts are not looked into. A forward that has to see numbers to go on
(`if x.max() > 3`) cannot be written down, and is refused.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbtrain.base.errors import NotSupported, text_of
from nbtrain.compat import fake_tensors, modules, pytree, tensors
from nbtrain.compat.intercept import listening
from nbtrain.strategies.kit.call_router import plain_class
from nbtrain.strategies.kit.known_functions import FORM, Known, known
from nbtrain.strategies.pipeline.cut_stages import StagedModel, holds
from nbtrain.strategies.pipeline.forward_program import HeldTensor, Program, Step, ValueRef
from nbtrain.strategies.pipeline.module_state import ModuleState
from nbtrain.strategies.pipeline.same_forward import constants

ASKS = FORM | fake_tensors.ASKS_OF_FORM | {"type"}
"""Functions that say no number of a tensor's, only its form."""
OURS = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
"""where no model's lines are"""
KEEPS = (
    "{part} puts tensors into a {name} that it is given, and under pipeline each rank would have another part of it. "
    "Let the forward return them; a model of transformers is called with use_cache=False, or under --strategy ddp"
)


class CannotRecord(Exception):
    """With the reason. `where`: the line that is it, as a sentence says it; empty if it is none."""

    where = ""


class OwnError(CannotRecord):
    """The forward has raised something, which it may do with numbers, too."""


class NeedsWhole(Exception):
    """Parameters that a forward computes with past the part that holds them: every rank has to have them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class Replaced(CannotRecord):
    """A layer came that no stage has."""


def record(staged: StagedModel, leaves: list[Any], tree: Any, is_owned: Callable[[torch.Tensor], bool]) -> Program:
    """The program of a call with these. `is_owned`: whether only one rank has this tensor. Raises `CannotRecord`
    and what is one, `NeedsWhole`, `OutOfOrder`."""
    with tensors.as_plain_tensors():  # no number of a weight is looked at, wherever it lies
        return _record(staged, leaves, tree, is_owned)


def _record(staged: StagedModel, leaves: list[Any], tree: Any, is_owned: Callable[[torch.Tensor], bool]) -> Program:
    mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    writer = ForwardRecorder(staged, is_owned)
    read, before = constants(staged), ModuleState(staged.root.modules())
    gradients = [(p, p.grad) for p in staged.root.parameters() if p.grad is not None]
    for p, _ in gradients:  # torch looks at them while it makes a tensor without numbers of p; another rank's say no
        p.grad = None
    drawn = random.getstate()
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # autocast would keep weights without numbers, and use them afterwards
    try:
        with fake_tensors.quiet(), mode:
            fakes = [mode.from_tensor(t.detach()) if isinstance(t, torch.Tensor) else t for t in leaves]
            for number, leaf in enumerate(fakes):
                writer.values.append(leaf)
                if isinstance(leaf, torch.Tensor):
                    writer.numbers[id(leaf)] = number
            args, kwargs = pytree.tree_unflatten(fakes, tree)
            apply = listening("torch.autograd.Function.apply", "record", writer.applies)
            with listening("torch.nn.Module.__call__", "record", writer.calls), apply, writer:
                returned = plain_class(staged.root).forward(staged.root, *args, **kwargs)
            output = writer.hook_name(returned)
            for leaf in pytree.tree_leaves(output):
                _check_returned(leaf)
            shapes = [leaf.shape for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    except (Replaced, NeedsWhole, NotSupported):
        raise
    except Exception as error:  # whatever the user's forward says of tensors without numbers
        raise _refusal(error) from None
    finally:
        torch.set_autocast_cache_enabled(cached)
        for p, grad in gradients:
            p.grad = grad
        inside = {id(m) for part in staged.parts for m in part.modules()}
        changed = next((name for module, name in before.set() if id(module) not in inside), "")
        before.put_back()  # a norm counts its batches in a buffer that is edited all the same
        differs = constants(staged) != read
    if changed:
        raise CannotRecord(f"it sets self.{changed}. Do that in the loop, below the call: `model.{changed} = …`")
    if differs:
        raise CannotRecord("it changes something that it reads: a global, or a value in a dict or an object")
    if random.getstate() != drawn:
        raise CannotRecord("it draws numbers from Python's random")
    if writer.wanted:
        raise NeedsWhole(writer.wanted)
    program = Program(writer.steps, len(leaves), output, len(staged.counts), staged.stage_of)
    program.shapes, program.once = shapes, writer.once
    return program


class ForwardRecorder(TorchFunctionMode):
    """Writes steps down while a forward runs."""

    def __init__(self, staged: StagedModel, is_owned: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.parts = {id(part): number for number, part in enumerate(staged.parts)}
        inside = {id(m) for part in staged.parts for m in part.modules()}
        self.through = {id(m) for m in staged.root.modules() if id(m) not in inside and any(
            id(inner) in self.parts for inner in m.modules()
        )}  # fmt: skip
        """modules whose forward is written down, too"""
        self.held = {id(m) for m in staged.root.modules()}
        self.is_owned = is_owned
        self.steps: list[Step] = []
        self.once: list[Step] = []
        self.read: set[int] = set()
        """ids of tensors of the model's that a step is given"""
        self.values: list[Any] = []
        """kept, so that no new one can take over an id"""
        self.numbers: dict[int, int] = {}
        self.wanted: list[torch.Tensor] = []
        self.inside = False
        """of a part"""
        self.autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        self.places = {
            id(tensor): HeldTensor(module, name)
            for module in staged.root.modules()
            for name, tensor in (*modules.parameters(module).items(), *modules.buffers(module).items())
            if tensor is not None
        }
        beside = (module for module in staged.root.modules() if id(module) not in inside)
        held = {id(t) for part in staged.parts for t in part.buffers()}
        self.counts = {id(t) for module in beside for t in modules.buffers(module).values()} - held
        """ids of buffers that no part has"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.inside or name in fake_tensors.SWITCHES:
            return func(*args, **kwargs)
        if (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")) != self.autocast:
            raise CannotRecord("it switches autocast")
        what = known(func)
        edited = args[0] if what.written and args and isinstance(args[0], torch.Tensor) else None
        if edited is not None and tensors.is_view(edited):
            raise CannotRecord(f"{name} changes a view of a tensor in place")
        if edited is not None and id(edited) not in self.numbers:
            self._count(func, args, kwargs, what)
            return edited
        getter = name == "__get__"
        if name == "__set__" or "out" in kwargs:
            raise CannotRecord(f"{name} sets something of a tensor")
        returned = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        if not made and edited is None:
            if getter or name in ASKS or returned is None or not _has_fakes((args, kwargs)):
                return returned
            raise CannotRecord(f"it looks at the numbers of a tensor ({name})")
        step = self._step(func, args, kwargs)
        step.fixed = what.draws
        if edited is not None:
            step.edits = self.numbers[id(edited)], self._new(edited)
        else:
            step.outs = self._numbered(returned)
        self.steps.append(step)
        return returned

    def calls(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of modules come here."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.inside or id(module) in self.through:
                return old(module, *args, **kwargs)
            if id(module) not in self.parts and id(module) in self.held and holds(module):
                raise Replaced
            step = self._step(module, args, kwargs)
            step.part, step.fixed = self.parts.get(id(module)), True
            self.inside = True
            try:
                with torch.no_grad():
                    returned = old(module, *args, **kwargs)
            finally:
                self.inside = False
            for leaf in pytree.tree_leaves((args, kwargs)):
                if not isinstance(leaf, torch.Tensor) and _keeps_tensors(leaf):
                    raise NotSupported(KEEPS.format(part=type(module).__name__, name=type(leaf).__name__))
            for leaf in pytree.tree_leaves(returned):
                _check_returned(leaf)
            step.outs = self._numbered(returned)
            self.steps.append(step)
            return returned

        return call

    def applies(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of functions with a backward of their own come here: what they do inside has no graph."""

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                raise CannotRecord(
                    f"it calls {function.__name__}.apply, whose backward is its own: call it in an nn.Module"
                )
            return old(function, *args, **kwargs)

        return apply

    def _count(self, func: Any, args: Any, kwargs: Any, what: Known) -> None:
        """A buffer that is edited by plain numbers (`self.calls += 1`), before it is read: every rank has it, and does
        that once for each call, however many micro-batches there are."""
        edited, given = args[0], pytree.tree_leaves((args[1:], kwargs))
        alone = id(edited) in self.counts and id(edited) not in self.read
        if not alone or what.draws or any(isinstance(leaf, torch.Tensor) for leaf in given):
            raise CannotRecord(f"{func.__name__} changes a tensor of the model in place")
        self.once.append(Step(func, (self.places[id(edited)], *args[1:]), kwargs))

    def hook_name(self, value: Any) -> Any:
        """With `ValueRef` in the places of values."""
        return pytree.tree_map_only(torch.Tensor, self._reference, value)

    def _step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Step:
        args, kwargs = self.hook_name((args, kwargs))
        return Step(call, args, kwargs, grad=torch.is_grad_enabled())

    def _reference(self, tensor: torch.Tensor) -> Any:
        number = self.numbers.get(id(tensor))
        if number is not None:
            return ValueRef(number)
        if isinstance(tensor, fake_tensors.FakeTensor):
            raise CannotRecord("it uses a tensor from elsewhere")
        self.read.add(id(tensor))
        if self.is_owned(tensor):
            self.wanted.append(tensor)
        return self.places.get(id(tensor), tensor)

    def _numbered(self, returned: Any) -> list[int | None]:
        return [self._new(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(returned)]

    def _new(self, tensor: torch.Tensor) -> int:
        """Under this number from now on, also if it was known under another."""
        self.values.append(tensor)
        self.numbers[id(tensor)] = len(self.values) - 1
        return len(self.values) - 1


def _refusal(error: Exception) -> CannotRecord:
    """With the last line of a model's that led to it."""
    refusal = error
    if isinstance(error, fake_tensors.ASKED_FOR_A_NUMBER):
        refusal = CannotRecord("it looks at the numbers of a tensor")
    if not isinstance(refusal, CannotRecord):
        said = text_of(error).strip().split("\n")[0]
        refusal = OwnError(f"{type(error).__name__}: {said[:160].rstrip('.')}")
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OURS)]
    refusal.where = f" because of the line `{lines[-1]}`" if lines and lines[-1] else ""
    return refusal


def _check_returned(leaf: Any) -> None:
    """What is put together of micro-batches is known leaf by leaf."""
    attributes = getattr(leaf, "__dict__", None) or {name: getattr(leaf, name, None) for name in _slots(leaf)}
    if not isinstance(leaf, ValueRef | HeldTensor | torch.Tensor) and _has_fakes(list(attributes.values())):
        name = type(leaf).__name__
        raise CannotRecord(f"it returns a {name}, which is no tuple, list or dict: let it return one of the tensors")


def _keeps_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object, or what its attributes hold, holds a tensor of this record."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, fake_tensors.FakeTensor)
    if isinstance(value, type | nn.Module) or not depth:
        return False
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(_keeps_tensors(part, depth - 1) for part in (*inner, *getattr(value, "__dict__", {}).values()))


def _slots(leaf: Any) -> tuple[str, ...]:
    names = getattr(type(leaf), "__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _has_fakes(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
