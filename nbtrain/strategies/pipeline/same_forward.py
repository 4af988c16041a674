"""What has to be equal for a model's forward to do the same: then its record (record_forward.py) holds.

That is what it is given, and what its code reads besides: attributes of the modules whose forward is written down,
globals and values of closures. Numbers of tensors are no part of it. Parts run as they are: what they read is not
looked at. It is looked at with each call, so it has to be quick.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from nbtrain.compat import modules
from nbtrain.installed_files import is_installed
from nbtrain.strategies.kit.call_router import plain_class
from nbtrain.strategies.pipeline.cut_stages import StagedModel

PLAIN = frozenset({
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type(...),
})  # fmt: skip
LONGEST = 256
"""A list or dict that is longer counts as data: it is known by which it is and how long."""
DEEPEST = 3
"""`CONFIG.model.scale`"""
OWN = frozenset(vars(nn.Module()))
MOST = 4096
"""codes whose names are kept"""

_names: dict[int, tuple[CodeType, tuple[str, ...], frozenset[str]]] = {}


def form_of(staged: StagedModel, leaves: list[Any], tree: Any) -> Any:
    """What must be equal for two calls of the model to have the same program."""
    given = tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else _given(leaf)
        for leaf in leaves
    )
    return given, str(tree), constants(staged), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def constants(staged: StagedModel) -> tuple[Any, ...]:
    """What the forward reads that is no tensor's number."""
    return tuple(_ReadCollector(staged).found)


class ForwardReads:
    """What the forward reads, before it is run for once only to be written down."""

    def __init__(self, staged: StagedModel) -> None:
        self.staged = staged
        self.kept: list[tuple[Any, Any]] = []
        self.before = tuple(_ReadCollector(staged, self.kept).found)

    def put_back(self) -> bool:
        """Puts back what the forward has changed; returns whether anything was."""
        differs = constants(self.staged) != self.before
        for holder, there in self.kept if differs else ():
            if isinstance(holder, list):
                holder[:] = there
            elif isinstance(holder, CellType):
                holder.cell_contents = there
            elif isinstance(holder, set) or isinstance(there, dict):
                holder.clear()
                holder.update(there)
            else:
                holder[there[0]] = there[1]
        return differs


def written(staged: StagedModel) -> Iterator[nn.Module]:
    """The modules whose forward is written down, or that merely hold such: neither parts nor inside of one."""
    parts = {id(part) for part in staged.parts}
    seen = {id(staged.root)}
    todo = [staged.root]
    while todo:
        module = todo.pop()
        yield module
        for inner in modules.children(module).values():
            if inner is not None and id(inner) not in parts and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)


class SameObject(ref):
    """Equal for the same object alone, as long as it lives: the next one may get its id."""

    __slots__ = ("number",)

    def __init__(self, of: Any) -> None:
        super().__init__(of)  # type: ignore[call-arg]
        self.number = id(of)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, SameObject) and self.number == other.number and self() is other() is not None
        )


class _ReadCollector:
    """Collects what the code of modules reads."""

    def __init__(self, staged: StagedModel, kept: list[tuple[Any, Any]] | None = None) -> None:
        """`kept`: where it was found, and what was there."""
        self.kept = kept
        self.found: list[Any] = []
        self.seen: set[int] = set()
        """functions"""
        self.names: set[str] = set()
        """attributes that their code asks something for"""
        for module in written(staged):
            self.at_module(module, staged.root)

    def at_module(self, module: nn.Module, root: nn.Module) -> None:
        cls = plain_class(module)
        self.found += (cls, module.training)
        for inner in modules.children(module).values():
            self.found.append(None if inner is None else SameObject(inner))
        own = vars(module).get("forward")
        if own is not None and module is not root:
            self.at_function(own)
        self.names.add("forward")
        bases = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("torch.")]
        done = self.at_class(bases, set())
        for name, value in vars(module).items():
            if name not in OWN:
                self.found += (name, self.value(value, 0))
        self.at_class(bases, done)

    def at_class(self, bases: list[type], done: set[str]) -> set[str]:
        """Methods and attributes of it that code names, and what they name."""
        while not self.names <= done:
            new = self.names - done
            done |= new
            for base in bases:
                table = vars(base)
                for name in sorted(table.keys() & new):
                    value = table[name]
                    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                    if isinstance(value, FunctionType):
                        self.at_function(value, forced=True)
                    else:
                        self.found += (name, self.value(value, 1))
        return done

    def at_function(self, function: Any, forced: bool = False) -> None:
        """What its code names. `forced`: also where it is an installed package's."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function) in self.seen:
            return
        code = function.__code__
        if not forced and is_installed(code.co_filename):
            return
        self.seen.add(id(function))
        order, names = _named(code)
        self.names |= names
        around = function.__globals__
        for name in order:
            value = around.get(name, self)
            if value is not self:
                kind = type(value)
                if self.kept is not None:
                    self.kept.append((around, (name, value)))
                self.found += (name, kind, value) if kind in PLAIN else (name, self.value(value, 0))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if self.kept is not None:
                self.kept.append((cell, value))
            self.found.append(self.value(value, 0))

    def value(self, value: Any, depth: int) -> Any:
        """Something to compare it by; of an object also what it has under names that code asks for."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is FunctionType or kind is MethodType:
            self.at_function(value)
            return SameObject(value) if kind is FunctionType else (SameObject(value.__func__), id(value.__self__))
        if kind in (list, tuple, dict, set) and depth <= DEEPEST:
            if len(value) > LONGEST:
                return kind, id(value), len(value)
            if self.kept is not None and kind is not tuple:
                self.kept.append((value, kind(value)))
            inner = [part for pair in value.items() for part in pair] if kind is dict else value
            parts = [self.value(part, depth + 1) for part in inner]
            return kind, frozenset(parts) if kind is set else tuple(parts)
        same = _same(value)
        if depth > DEEPEST or isinstance(value, (torch.Tensor, nn.Module)) or _is_installed(value):
            return same
        table = getattr(value, "__dict__", None)
        if not table:
            return same
        asked = sorted(table.keys() & self.names)
        if self.kept is not None and isinstance(table, dict):
            self.kept += [(table, (name, table[name])) for name in asked]
        return same, tuple((name, self.value(table[name], depth + 1)) for name in asked)


def _same(value: Any) -> Any:
    if isinstance(value, (int, float, complex, str)):  # of a subclass: enums, numpy's
        return type(value), value
    try:
        return SameObject(value)
    except TypeError:
        return type(value), id(value)


def _is_installed(value: Any) -> bool:
    """What is installed is taken to stay as it is."""
    return isinstance(value, ModuleType) and is_installed(getattr(value, "__file__", None) or "<frozen")


def _named(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that it names, and the attributes; also in functions that it makes."""
    known = _names.get(id(code))
    if known is not None:
        return known[1], known[2]
    around = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    order, attributes = {name: None for name in code.co_names if name in around}, set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            inner, asked = _named(const)
            order.update(dict.fromkeys(inner))
            attributes |= asked
    if len(_names) >= MOST:
        _names.clear()
    _names[id(code)] = code, tuple(order), frozenset(attributes)
    return tuple(order), frozenset(attributes)


def _given(leaf: Any) -> Any:
    return (type(leaf), leaf) if isinstance(leaf, (int, float, str, bool, bytes, type(None))) else id(leaf)
