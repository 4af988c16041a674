"""What the forward of a model reads besides its arguments: attributes of its modules, globals and values of closures.

Two calls for which all of it is the same do the same with what they are given. Numbers of tensors are no part of it. It
is looked at with each call, so it has to be quick.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from nbtrain.base.installed_files import is_installed
from nbtrain.compat import modules
from nbtrain.strategies.kit.call_router import plain_class

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


class SameObject(ref):
    """Equal for the same object alone, as long as it lives: the next one may get its id. A plain `ref` is that for
    objects that are compared by identity, and needs no Python."""

    __slots__ = ("number",)

    def __init__(self, of: Any) -> None:
        super().__init__(of)  # type: ignore[call-arg]  # typeshed has __new__ alone
        self.number = id(of)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, SameObject) and self.number == other.number and self() is other() is not None
        )


class KeptObject:
    """The same for an object that cannot be referred to weakly: it is kept alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptObject) and other.value is self.value


class ReadCollector:
    """Collects what the code of modules reads."""

    def __init__(self, read: Iterable[nn.Module], root: nn.Module | None = None) -> None:
        """`read`: the modules. `root`: one whose `forward` in its own `__dict__` is not the user's."""
        self.found: list[Any] = []
        self.seen: set[int] = set()
        """functions"""
        self.names: set[str] = set()
        """attributes that their code asks something for"""
        for module in read:
            self.at_module(module, root)

    def at_module(self, module: nn.Module, root: nn.Module | None) -> None:
        cls = plain_class(module)
        self.found += (cls, module.training)
        inner = modules.children(module).values()
        plain = {cls for cls in set(map(type, inner)) - {type(None)} if _compares_by_identity(cls)}
        self.found += [ref(part) if type(part) in plain else _same(part) for part in inner]
        own = vars(module).get("forward")
        if own is not None and module is not root:
            self.at_function(own)
        self.names.add("forward")
        bases = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("torch.")]
        done = self.at_class(bases, set())
        for name, value in vars(module).items():
            if name not in OWN and name != modules.CALL:
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
                self.found += (name, kind, value) if kind in PLAIN else (name, self.value(value, 0))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.found.append(self.value(value, 0))

    def value(self, value: Any, depth: int) -> Any:
        """Something to compare it by; of an object also what it has under names that code asks for."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is FunctionType or kind is MethodType:
            self.at_function(value)
            return SameObject(value) if kind is FunctionType else (SameObject(value.__func__), id(value.__self__))
        if kind is slice:
            return kind, *(self.value(bound, depth) for bound in (value.start, value.stop, value.step))
        if kind in (list, tuple, dict, set, frozenset) and depth <= DEEPEST:
            if len(value) > LONGEST:
                return kind, id(value), len(value)
            inner = [part for pair in value.items() for part in pair] if kind is dict else value
            parts = [self.value(part, depth + 1) for part in inner]
            return kind, frozenset(parts) if kind in (set, frozenset) else tuple(parts)
        same = _same(value)
        if depth > DEEPEST or isinstance(value, (torch.Tensor, nn.Module)) or _is_installed(value):
            return same
        table = getattr(value, "__dict__", None)
        if not table:
            return same
        asked = sorted(table.keys() & self.names)
        return same, tuple((name, self.value(table[name], depth + 1)) for name in asked)


def _same(value: Any) -> Any:
    if isinstance(value, (int, float, complex, str)):  # of a subclass: enums, numpy's
        return type(value), value
    try:
        return ref(value) if _compares_by_identity(type(value)) else SameObject(value)
    except TypeError:  # it cannot be referred to weakly
        return KeptObject(value)


def _compares_by_identity(cls: Any) -> bool:
    return cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__


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
