"""Writes the way from one object to another that it holds as a person would: `cfg["tags"][3].name`.

Addresses of what a strategy prepares, and every error that names an object, come from here.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Union

from nbtrain.compat.modules import BUFFERS, CHILDREN, PARAMETERS
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import arrays, dispatch
from nbtrain.exchange.kinds.base import ATOMS, MISSING, Handle, Node
from nbtrain.exchange.kinds.objects import raw_attribute, slots_of
from nbtrain.exchange.kinds.python_module_state import ModuleState

FAR = 20_000
"""Objects that are looked at on the way into one that only its own pickle can move."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step: `.tricks`, `['guard']`, ` (its closure variable 's')`."""

    owner: Any
    kind: str
    key: Any

    def __str__(self) -> str:
        key = self.key
        if self.kind == "attr":
            return f".{key}"
        if self.kind == "item":
            # A parameter, the key of an optimizer's state, would be printed with its numbers.
            return f"[{key!r}]" if type(key) in ATOMS else f"[<{type(key).__name__}>]"
        return _WORDS[self.kind].format(key)


Trail = Union[str, "tuple[Node | _Unknown, Trail]"]
"""A name, or the holder and the trail to it."""

_WORDS = {
    "closure": " (its closure variable {!r})",
    "default": " (default of its argument {!r})",
    "class": " (its class {})",
    "base": " (its base class {})",
    "element": " (an element)",
    "key": " (a key)",
    "keyword": ".keywords[{!r}]",
    "flat": ".flat[{}]",
    "through": "",
}

_THROUGH = (
    tuple, frozenset, types.MethodType, staticmethod, classmethod, property, types.CellType, types.MappingProxyType,
    types.BuiltinFunctionType, slice,
)  # fmt: skip
"""They add nothing to a path: they travel inside their holder."""

_NOT_INTO = (str, bytes, int, float, types.ModuleType, Handle)


def path_suffix(holder: Any, child: Any) -> str:
    """What is appended to the holder's address to name its child; "" where no way is found."""
    return "".join(map(str, steps_to(holder, child) or ()))


def steps_to(holder: Any, child: Any, deep: bool = False) -> list[PathStep] | None:
    """The steps from a holder to what it holds; None: not found. `deep`: through other objects too."""
    ahead: deque[tuple[Any, tuple[PathStep, ...]]] = deque([(holder, ())])
    seen: set[int] = set()
    while ahead and len(seen) < FAR:
        obj, before = ahead.popleft()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        for kind, key, member in _members(obj):
            if member is child:
                return [*before, PathStep(obj, kind, key)]
            cls = type(member)  # `isinstance` would ask the object itself
            if issubclass(cls, _THROUGH) or (deep and not issubclass(cls, _NOT_INTO)):
                ahead.append((member, (*before, PathStep(obj, kind, key))))
    return None


def follow(path: str, namespace: dict[str, Any]) -> tuple[str, list[PathStep], Any]:
    """Follow a path of the other side's here as far as it goes: name, steps, and the object at the end."""
    name = next((known for known in sorted(namespace, key=len, reverse=True) if path.startswith(known)), "")
    obj, rest, segments = namespace.get(name), path[len(name) :], list[PathStep]()
    while name and rest:
        steps = [(PathStep(obj, kind, key), member) for kind, key, member in _members(obj)]
        parts = [(str(segment), segment, member) for segment, member in steps]
        fitting = [part for part in parts if part[0] and rest.startswith(part[0])]
        if not fitting:
            through = [part for part in parts if not part[0]]
            if len(through) != 1:
                break
            fitting = through
        text, segment, obj = max(fitting, key=lambda part: len(part[0]))
        rest = rest[len(text) :]
        segments.append(segment)
    return name, segments, obj


def _members(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    with suppress(Exception):  # a property may raise anything
        yield from _parts(obj)


def _parts(obj: Any) -> Iterable[tuple[str, Any, Any]]:
    if isinstance(obj, types.FunctionType):
        return _of_function(obj)
    if isinstance(obj, types.CellType):
        return _of_cell(obj)
    if isinstance(obj, (types.MethodType, staticmethod, classmethod, types.BuiltinFunctionType)):
        functions = [getattr(obj, name, None) for name in ("__self__", "__func__")]
        return [("through", None, function) for function in functions]
    if isinstance(obj, property):
        return [("through", None, function) for function in (obj.fget, obj.fset, obj.fdel)]
    if isinstance(obj, type):
        own = [("attr", name, value) for name, value in type.__getattribute__(obj, "__dict__").items()]
        return [*own, *(("base", base.__name__, base) for base in obj.__bases__)]
    return _of_object(obj)


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        yield "closure", name, cell
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=False):
        yield "default", name, value
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield "default", name, value
    for name, value in vars(fn).items():
        yield "attr", name, value


def _of_cell(cell: types.CellType) -> Iterator[tuple[str, Any, Any]]:
    try:
        yield "through", None, cell.cell_contents
    except ValueError:  # not filled yet
        return


def _of_object(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    """What an object holds; its class's own `__iter__` and `__getattr__` are not asked."""
    cls = type(obj)
    yield from _of_container(obj)
    attributes = raw_attribute(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from _of_tables(attributes)
    for slot in slots_of(cls):
        value = raw_attribute(obj, slot)
        if value is not MISSING:
            yield "attr", slot, value
    if cls.__module__ == "__main__":
        yield "class", cls.__name__, cls


def _of_container(obj: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(obj, dict):
        for key, value in list(dict.items(obj)):
            yield "item", key, value
            yield "key", None, key
    elif isinstance(obj, types.MappingProxyType):
        for key, value in list(obj.items()):
            yield "item", key, value
    elif isinstance(obj, (list, tuple, deque)):
        base: Any = next(kind for kind in (list, tuple, deque) if isinstance(obj, kind))
        for index, value in enumerate(base.__iter__(obj)):
            yield "item", index, value
    elif isinstance(obj, (set, frozenset)):
        plain: Any = set if isinstance(obj, set) else frozenset
        for value in plain.__iter__(obj):
            yield "element", None, value
    elif isinstance(obj, functools.partial):
        yield "attr", "func", obj.func
        yield "attr", "args", obj.args
        yield "attr", "keywords", obj.keywords
        for key, value in obj.keywords.items():
            yield "keyword", key, value
    elif arrays.kind_of(obj) is arrays.OBJECTS:
        for index, value in enumerate(obj.flat):
            yield "flat", index, value
    elif isinstance(obj, ModuleState):
        for path, value in obj.entries.items():
            yield "attr", path, value


def _of_tables(attributes: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for box in (CHILDREN, PARAMETERS, BUFFERS) if CHILDREN in attributes else ():
        for key, value in attributes[box].items():
            yield ("item", int(key), value) if key.isdigit() else ("attr", key, value)
    for key, value in list(attributes.items()):
        yield "attr", key, value


class FoundObjects(dict[str, Any]):
    """Address → object."""

    checked: object = None
    """a mark of whoever need not look at them again"""


def find_all(table: ObjectTable, names: Mapping[str, Any], wanted: tuple[type, ...]) -> FoundObjects:
    """Every object of these types below some names, by an address a person understands; of a model, not its parts."""
    by_address = FoundObjects()
    parts: set[int] = set()
    seen: set[int] = set()
    todo: list[tuple[Node, Trail]] = []
    for name, value in names.items():
        node = table.find(value)
        if node is not None:
            todo.append((node, name))
        elif type(value) not in ATOMS:
            todo += [(part, (_Unknown(value), name)) for part in _known_parts(table, value)]
    todo.reverse()
    while todo:
        node, trail = todo.pop()
        if node.key in seen:
            continue
        seen.add(node.key)
        if isinstance(node.obj, wanted) and id(node.obj) not in parts:
            by_address[_address(node, trail)] = node.obj
            if hasattr(node.obj, "modules"):
                parts.update(map(id, node.obj.modules()))
        if node.kind.whole:
            continue
        below = [*(node.fixed or ()), *node.children]  # the first: what a function closes over
        todo.extend((child, (node, trail)) for child in reversed(below))
    return by_address


@dataclass(slots=True)
class _Unknown:
    """What a name holds that has no twin of its own: a tuple, a bound method."""

    obj: Any


def _known_parts(table: ObjectTable, value: Any) -> Iterator[Node]:
    kind = dispatch.kind_of(value, {}) if type(value) not in ATOMS else None
    for part in kind.parts(value) if kind is not None and kind.compound else ():
        if (node := table.find(part)) is not None:
            yield node
        else:
            yield from _known_parts(table, part)


def _address(node: Node, trail: Trail) -> str:
    """The address at the end of a trail. Made for what was found only: to look for each step takes longest."""
    address, at = "", node.obj
    while not isinstance(trail, str):
        holder, trail = trail
        address, at = path_suffix(holder.obj, at) + address, holder.obj
    return trail + address
