"""Initialises models that were made without content (`nbtrain.empty()`, torch's device "meta").

The numbers are those of the modules' own `reset_parameters`, drawn on the CPU from a seed of each module's own, so that
they are the same under every strategy, for any number of ranks and on every device. Only one module's weights exist
in full at any time.

Nothing is called on the model itself, which may be in pieces by then, but on *empty copies*: modules of the same class
and attributes, with tensors of their own. Module by module, with its tensors real and all others without memory, what
may write to them is run, in the order in which constructors would have: its own reset, and those of the modules around
it (`nn.MultiheadAttention` fills a weight of its child, `nn.Transformer` those of all its layers).

How a module begins is looked for in this order, and all that there is, is run:

    reset_parameters(), _reset_parameters() or init_weights()     the first of them that takes no arguments
    reset_buffers()
    _init_weights(module)                                         of the nearest module around it, as transformers do

What nobody fills is an error that names it.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from nbtrain.base.empty_models import NOTE
from nbtrain.base.errors import UsageError, text_of
from nbtrain.compat import fake_tensors
from nbtrain.compat.modules import BUFFERS, CHILDREN, INITIALIZER, PARAMETERS, RESETS
from nbtrain.compat.tensors import hook_tables, memory_id, without_seed
from nbtrain.exchange.kinds.gradient_hooks import hooked
from nbtrain.exchange.kinds.tensors import swapped
from nbtrain.strategies.base import Component, Prepared, is_lazy, pieces_of
from nbtrain.strategies.kit.component_tensors import is_blank
from nbtrain.worker.random_states.default_generators import capture, restore
from nbtrain.worker.ranks.collectives import connected, gather

BOXES = (PARAMETERS, BUFFERS)


@dataclass(slots=True)
class EmptyTensor:
    """A tensor without content, in the module that holds it first."""

    module: nn.Module
    box: str
    name: str
    old: torch.Tensor
    """the tensor when it was found"""

    @property
    def now(self) -> torch.Tensor:
        tensor: torch.Tensor = vars(self.module)[self.box][self.name]
        return tensor


@dataclass(slots=True)
class _Part:
    """One module of the model."""

    path: str
    module: nn.Module
    copy: nn.Module
    spots: list[EmptyTensor] = field(default_factory=list)
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """buffers with content, which a reset may need"""
    steps: list[_Step] = field(default_factory=list)
    """the calls that write to its tensors, in order"""
    seed: int = 0


@dataclass(slots=True)
class _Step:
    """A call that initialises tensors."""

    owner: nn.Module
    """an empty copy"""
    call: Callable[[], Any]
    name: str


class MetaInit:
    """The tensors of a component that have no content. Found before a strategy sets it up; filled in before that
    (`fill`) for strategies that keep whole models, after it (`deal_out`) for those that keep pieces."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, component: Component) -> MetaInit:
        """Of a component that has such tensors. Collective: all ranks take rank 0's seeds."""
        for where, loose in component.loose.items():
            if is_blank(loose):
                raise UsageError(
                    f"{where} is a parameter without content (on the device 'meta') that belongs to no module, so "
                    "nothing says how it begins: make it outside of nbtrain.empty()"
                )
        parts = _parts(component.modules.values())
        _find_steps(component.modules.values(), parts)
        lacking = [part for part in parts.values() if part.spots]
        for part in lacking:
            if not part.steps:
                raise _unfilled(part, part.spots)
        seeds = [part.seed for part in lacking]
        if connected():  # a model that is made in a cell may have others on each rank
            seeds = gather(seeds)[0]
        for part, seed in zip(lacking, seeds, strict=True):
            part.seed = seed
        return cls(lacking)

    def values(self) -> Iterator[tuple[EmptyTensor, torch.Tensor]]:
        """Each tensor with its content, on the CPU. Only one module's tensors exist at any time."""
        for part in self._parts:
            yield from _filled(part)

    def fill(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give the component's tensors their content. Where they cannot stay the same objects, the pairs (old, new) are
        returned, and the caller replaces all references."""
        replaced = []
        for spot, value in self.values():
            replaced += _make_real(spot, value.to(device))
            del value  # or it would be there with the next module's
        return replaced

    def hollow(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make expanded parameters with one number in memory, for libraries that do not know the device meta."""
        replaced = []
        for spot in (spot for part in self._parts for spot in part.spots):
            old = spot.old
            shell = torch.zeros((), dtype=old.dtype, device=device).expand(old.shape)
            replaced += _make_real(spot, shell if isinstance(old, nn.Parameter) else shell.clone())
        return replaced

    def deal_out(self, prepared: Prepared, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """After `set_up`: fill in the pieces that this rank has. Not collective."""
        pieces = {id(tensor): piece for tensor, piece in pieces_of(prepared)}
        replaced = []
        for spot, value in self.values():
            now = spot.now
            if id(now) in pieces:
                pieces[id(now)].fill(value.detach())
            elif is_blank(now):
                replaced += _make_real(spot, value.to(device, now.dtype))  # `set_up` may have cast it
            else:
                with torch.no_grad():
                    now.copy_(value)
            del value
        return replaced


def _parts(roots: Iterable[nn.Module]) -> dict[int, _Part]:
    """The modules of the models, by id; children come after their parents."""
    parts: dict[int, _Part] = {}
    tensors: dict[int, tuple[bool, _Part, EmptyTensor]] = {}
    base = zlib.crc32(without_seed(torch.get_rng_state()).numpy().tobytes())  # the seed itself is nbtrain's
    for root in roots:
        for path, module in root.named_modules():
            if id(module) in parts:
                continue
            part = parts[id(module)] = _Part(path, module, _empty_copy(module))
            # One that was made without `nbtrain.empty()` gets a seed from its path.
            part.seed, *made = vars(module).get(NOTE) or [zlib.crc32(path.encode(), base)]
            part.buffers = [(n, b) for n, b in vars(module)[BUFFERS].items() if b is not None and not b.is_meta]
            for box in BOXES:
                for name, tensor in vars(module)[box].items():
                    # Of several that hold it, the module that made it fills it.
                    known = tensor is not None and tensors.get(id(tensor))
                    if tensor is not None and is_blank(tensor) and (not known or (name in made and not known[0])):
                        tensors[id(tensor)] = name in made, part, EmptyTensor(module, box, name, tensor)
    for _, part, spot in tensors.values():
        part.spots.append(spot)
    for part in parts.values():
        children = vars(part.copy)[CHILDREN]
        children.update({name: child and parts[id(child)].copy for name, child in children.items()})
    return parts


def _empty_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with tensors of its own without content."""
    copy: nn.Module = type(module).__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy)[CHILDREN] = dict(vars(module)[CHILDREN])
    for box in BOXES:
        vars(copy)[box] = {
            name: tensor if tensor is None or is_lazy(tensor) else _like(tensor, torch.device("meta"))
            for name, tensor in vars(module)[box].items()
        }
    return copy


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _find_steps(roots: Iterable[nn.Module], parts: dict[int, _Part]) -> None:
    """Find the calls that may write to each module's tensors: its own, then those of the modules around it."""
    seen: set[int] = set()

    def visit(part: _Part, around: Any, resets: list[_Step], inits: list[_Step]) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        copy = part.copy
        if callable(getattr(type(copy), INITIALIZER, None)):
            around = copy
        names = [name for name in RESETS if _takes_nothing(copy, name)]
        if around is not None:  # there, `init_weights` does this and more
            names = [name for name in names if name != "init_weights"]
        names = names[:1] + [name for name in ("reset_buffers",) if _takes_nothing(copy, name)]
        resets = [*(_Step(copy, getattr(copy, name), name) for name in names), *resets]
        if around is not None:
            inits = [_Step(copy, partial(getattr(around, INITIALIZER), copy), INITIALIZER), *inits]
        part.steps = [*resets, *inits]
        for child in part.module.children():
            visit(parts[id(child)], around, resets, inits)

    for root in roots:
        visit(parts[id(root)], None, [], [])


def _takes_nothing(module: nn.Module, name: str) -> bool:
    """Whether its class has such a method without arguments, and does not take it from another module."""
    method = getattr(module, name) if hasattr(type(module), name) else None
    if not inspect.ismethod(method):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = inspect.signature(method).parameters.values()
    return all(parameter.default is not parameter.empty or parameter.kind in kinds for parameter in given)


def _filled(part: _Part) -> list[tuple[EmptyTensor, torch.Tensor]]:
    """Initialise one module's tensors by its own methods."""
    tables = vars(part.copy)
    # In the notebook's dtype: the component's own may have been cast meanwhile.
    hollow = [tables[spot.box][spot.name] for spot in part.spots]
    real = [_like(blank, torch.device("cpu")) for blank in hollow]
    blanks = [(tables[BUFFERS][name], buffer) for name, buffer in part.buffers]
    kept = [(blank, buffer.to("cpu", blank.dtype, copy=True)) for blank, buffer in blanks]
    pairs = [*kept, *zip(hollow, real, strict=True)]
    watch = _Watch()
    states = capture()
    try:
        _place(part, {id(blank): new for blank, new in pairs})
        torch.default_generator.manual_seed(part.seed)
        with watch:
            for step in part.steps:
                try:
                    step.call()
                except Exception:  # of a module around it, which needs numbers of others
                    if step.owner is part.copy:
                        raise
    except Exception as error:
        raise UsageError(
            f"{_name(part)} was made without content, and {step.name}() of {type(step.owner).__name__} cannot fill it: "
            f"{type(error).__name__}: {text_of(error)}. It may use nothing but what is its own: one module is filled "
            "at a time"
        ) from error
    finally:
        _place(part, {id(new): blank for blank, new in pairs})
        restore(states)
    filled = list(zip(part.spots, real, strict=True))
    left = [spot for spot, new in filled if new.numel() and _memory(new) not in watch.written]
    if left:
        raise _unfilled(part, left)
    return filled


def _place(part: _Part, others: dict[int, torch.Tensor]) -> None:
    """Replace tensors of the empty copy."""
    for box in BOXES:
        table = vars(part.copy)[box]
        table.update({name: others[id(tensor)] for name, tensor in table.items() if id(tensor) in others})


def _unfilled(part: _Part, spots: list[EmptyTensor]) -> UsageError:
    names = ", ".join(spot.name for spot in spots)
    buffers = all(spot.box == BUFFERS for spot in spots)
    method = "reset_buffers" if buffers else "reset_parameters"
    return UsageError(
        f"{_name(part)} was made without content, and nothing says how its {names} begin"
        f"{'s' if len(spots) == 1 else ''}: give {type(part.module).__name__} a {method}() that fills {names}, or make "
        "it outside of nbtrain.empty()"
    )


def _name(part: _Part) -> str:
    return f"{part.path} ({type(part.module).__name__})" if part.path else type(part.module).__name__


def _make_real(spot: EmptyTensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    old = spot.now
    new = nn.Parameter(value.detach(), old.requires_grad) if isinstance(old, nn.Parameter) else value
    if not hooked(old) and swapped(old, new):  # hooks would stay with what it was
        return []
    vars(new).update(vars(old))
    vars(spot.module)[spot.box][spot.name] = new
    registers = new.register_hook, new.register_post_accumulate_grad_hook
    for table, register in zip(hook_tables(old), registers, strict=True):
        for hook in (table or {}).values():
            register(hook)
    return [(old, new)]


def _memory(tensor: torch.Tensor) -> int:
    return memory_id(tensor.untyped_storage())


class _Watch(fake_tensors.DispatchMode):
    """Notes what memory is written to; versions do not show `weight.data.normal_()`."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(fake_tensors.schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                several = given if isinstance(given, (list, tuple)) else [given]
                self.written |= {_memory(result) for result in several if isinstance(result, torch.Tensor)}
        return func(*args, **kwargs)
