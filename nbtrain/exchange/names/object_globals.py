"""Finds the globals that an object may read when it is used, through the functions and notebook classes it holds.

A model's `forward` reads globals although the cell names the model only; so does the `collate_fn` of a loader and the
lambda in a scheduler. Nothing of the user's is called on the way: no properties, no `__getattr__`, no `__iter__`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain, islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from nbtrain.compat import modules, tensors
from nbtrain.exchange.kinds.base import Handle
from nbtrain.exchange.names.code_globals import function_names

ELEMENTS = 1000
"""Elements of one list, dict or set that are looked at."""
OBJECTS = 20_000
"""Objects that are looked at for one name, the nearest first."""

Contents = Callable[[Any], Iterable[Any]]

_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, type(None), type(...), range, slice, ModuleType, CodeType}
)
_TABLES = frozenset({dict, OrderedDict, set})
_QUALNAME: Any = type.__dict__["__qualname__"]  # a metaclass of the user's may have its own idea of it
_FACTORY: Any = vars(defaultdict)["default_factory"]  # a subclass of the user's may have a property of that name
_QUIET_ENTRIES = frozenset({modules.PARAMETERS, modules.BUFFERS, modules.NOT_SAVED})


class ObjectSearch:
    """One search through objects of one namespace; an object is opened once, whichever name leads to it."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._module = namespace.get("__name__", "__main__")
        self._seen: set[int] = set()
        self._contents_of: dict[type, Contents | None] = {}
        self.writes: set[str] = set()
        """the globals that the functions found declare and assign"""

    def reads(self, root: object) -> set[str]:
        """The globals that `root`, and all it holds, reads; what was already reached earlier is left out."""
        names_read: set[str] = set()
        ahead: deque[Any] = deque([root])
        seen, known = self._seen, self._contents_of
        left = OBJECTS
        while ahead and left:
            value = ahead.popleft()
            kind = type(value)
            try:
                contents = known[kind]
            except KeyError:
                contents = known[kind] = self._contents(kind)
            if contents is None or id(value) in seen:
                continue
            seen.add(id(value))
            left -= 1
            if kind is FunctionType and value.__globals__ is self._namespace:
                names = function_names(value.__code__)
                names_read |= names.reads
                self.writes |= names.writes
                self._name(value, value.__qualname__, names_read)
            elif contents == self._of_class and self._is_own(value):
                self._name(value, _QUALNAME.__get__(value), names_read)
            ahead.extend(contents(value))
        return names_read

    def _name(self, value: Any, qualname: str, names: set[str]) -> None:
        """Add the name of a function or class that is reached, where `torch.save(model)` looks for it on the ranks."""
        top, *inner = qualname.split(".")
        value_now = self._namespace.get(top)
        for name in inner:
            value_now = type.__getattribute__(value_now, "__dict__").get(name) if isinstance(value_now, type) else None
        if value_now is value:
            names.add(top)

    def _contents(self, kind: type) -> Contents | None:
        """How to see into objects of a type; None when there is nothing in them."""
        if kind in _PLAIN:
            return None
        if kind in _CONTENTS:
            return _CONTENTS[kind]
        if issubclass(kind, type):
            return self._of_class
        if issubclass(kind, ModuleType):
            return None
        own = self._is_own(kind)
        if hasattr(kind, "__array__"):
            if tensors.can_have_hooks(kind):
                return _of_tensor
            if not own:  # arrays, data frames
                return None
        parts = [contents for base, contents in _CONTENTS.items() if issubclass(kind, base)]
        if kind.__dictoffset__:
            parts.append(_of_instance)
        if own:
            slots = [
                slot
                for base in kind.__mro__
                if self._is_own(base)
                for slot in vars(base).values()
                if isinstance(slot, MemberDescriptorType)
            ]
            parts.append(lambda value: [kind, *_slot_values(slots, value)])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else lambda value: chain.from_iterable(part(value) for part in parts)

    def _is_own(self, kind: type) -> bool:
        return bool(kind.__module__ == self._module)

    def _of_class(self, kind: type) -> Iterable[Any]:
        """What a notebook class holds. Library classes travel by name, and read nothing of the notebook's."""
        if not self._is_own(kind):
            return ()
        return chain(type.__getattribute__(kind, "__dict__").values(), kind.__bases__, (type(kind),))


def _of_function(value: FunctionType) -> Iterable[Any]:
    values: list[Any] = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        values.extend(_of_cell(cell))
    if value.__dict__:
        values.extend(value.__dict__.values())  # __wrapped__ among them
    return values


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _of_dict(value: dict[Any, Any]) -> Iterable[Any]:
    # list(…) at once: a thread may be writing into it
    return [*islice(dict.keys(value), ELEMENTS), *islice(dict.values(value), ELEMENTS)]


def _of_default_dict(value: defaultdict[Any, Any]) -> Iterable[Any]:
    return [_FACTORY.__get__(value), *_of_dict(value)]


def _of_tensor(value: Any) -> Iterable[Any]:
    """The hooks that a tensor calls when its gradient comes."""
    before, after = tensors.hook_tables(value)
    if not (before or after) or not tensors.is_leaf(value):
        return ()
    return [hook for table in (before, after) if table for hook in table.values()]


def _of_instance(value: object) -> Iterable[Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # a property of that name may raise anything
        return ()
    if not isinstance(attributes, dict):
        return ()
    if modules.CHILDREN in attributes and modules.PARAMETERS in attributes:
        # most of a module's many tables are empty, and a model has thousands of them
        values = [
            entry
            for name, entry in list(dict.items(attributes))
            if (kind := type(entry)) not in _PLAIN and name not in _QUIET_ENTRIES and (kind not in _TABLES or entry)
        ]
        parameters = attributes[modules.PARAMETERS]
        if isinstance(parameters, dict):  # a scripted module has a table of its own
            values += [p for p in dict.values(parameters) if p is not None and any(tensors.hook_tables(p))]
        layers = attributes[modules.CHILDREN]
        # never cut: a container of two thousand layers counts whole
        return [*values, *dict.values(layers)] if isinstance(layers, dict) else values
    return list(dict.values(attributes))


def _slot_values(slots: list[MemberDescriptorType], value: object) -> list[Any]:
    values = []
    for slot in slots:
        try:
            values.append(slot.__get__(value))
        except AttributeError:  # empty
            continue
    return values


def _elements(kind: type) -> Contents:
    """By the type's own `__iter__`: that of a user's subclass may do anything."""
    # one of Python's containers
    return lambda value: list(islice(kind.__iter__(value), ELEMENTS))  # type: ignore[attr-defined]


_CONTENTS: dict[type, Contents] = {
    FunctionType: _of_function,
    MethodType: lambda value: (value.__func__, value.__self__),
    BuiltinFunctionType: lambda value: (value.__self__,),  # `history.append`
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    CellType: _of_cell,
    MappingProxyType: lambda value: list(islice(value.values(), ELEMENTS)),
    defaultdict: _of_default_dict,
    dict: _of_dict,
    list: _elements(list),
    tuple: _elements(tuple),
    set: _elements(set),
    frozenset: _elements(frozenset),
    deque: _elements(deque),
    Handle: lambda value: value.holds,  # not the way to the ranks
}
