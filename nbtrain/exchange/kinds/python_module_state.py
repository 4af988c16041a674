"""Sends what was set in a local module after its file had been executed.

A module travels by name, so each side executes its file. What was set afterwards (`config.lr = 42`, `Config.lr = 42`,
a list that grew) is what differs from what that execution gave, and travels as values of names do. Objects that the
file made are told from others by their place in it, so that the other side edits what its own execution made.
"""

from __future__ import annotations

import enum
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from nbtrain.compat import namespaces, python
from nbtrain.exchange.kinds.base import ATOMS, MISSING, Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.containers import same_items

MODULE = "module "
"""Prefix of the names under which the states of modules travel; no Python name begins so."""
_COMPILED = re.compile(namespaces.OF_COMPILER)
_CLASSES = 1000
"""Classes of one module that are looked into."""

Place = tuple[str, Any, tuple[Any, ...]]
"""Where a file made an object: the module, which text of it was executed, and the way to the object."""


class ModuleState:
    """What is known of one local module in this process, also when its file is executed again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text: Any = None
        """which text was executed"""
        self.base: dict[str, Any] | None = None
        """what there was when the file had been executed: `lr`, `Config.lr`; None: nobody saw it"""
        self.made: Any = None
        """what the file made (`exchange/python_module_baseline.py`)"""
        self.places: dict[tuple[Any, ...], Any] = {}
        """way → what the file made there"""
        self.shared: set[str] = set()
        """what either side has ever changed: both have it, also when it is as in the file again"""
        self.entries: dict[str, Any] = {}
        """the values of these now"""
        self.refused: dict[str, Any] = {}
        """those that cannot travel"""
        self.seconds = 0.0
        """how long the last look took"""
        self.stale = False
        """what the file made was changed and cannot be put back: it has to be executed again"""

    @property
    def module(self) -> ModuleType | None:
        module = sys.modules.get(self.name)
        return module if type(module) is ModuleType else None

    def values(self) -> dict[str, Any]:
        """Everything in the module that may have been set, by its path."""
        module = self.module
        if module is None:
            return {}
        values = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("__")
            # Python sets a package's modules on it when they are imported.
            and not (type(value) is ModuleType and sys.modules.get(f"{self.name}.{name}") is value)
        }
        for path, cls in self._classes(values):
            closed = issubclass(cls, enum.Enum)  # Python keeps there which members it has composed
            for name, value in type.__getattribute__(cls, "__dict__").items():
                if type(value) is FunctionType or not (closed or name.startswith("__") or name in python.OF_CLASSES):
                    values[f"{path}.{name}"] = value
        return {path: value for path, value in values.items() if not _COMPILED.fullmatch(path)}

    def set(self, values: dict[str, Any], gone: Iterable[str] = ()) -> None:
        """Set and delete names of the module, as far as the classes of their holders allow it."""
        for path, value in (*values.items(), *((path, MISSING) for path in gone)):
            holder, name = self._holder(path)
            if holder is not None and _held(holder, name) is not value:
                with suppress(Exception):
                    if value is MISSING:
                        delattr(holder, name)
                    else:
                        setattr(holder, name, value)

    def forget(self) -> None:
        self.shared.clear()
        self.entries, self.refused = {}, {}

    def _classes(self, values: dict[str, Any]) -> Iterator[tuple[str, type]]:
        """The classes that the module defines, nested ones included."""
        ahead = [(name, value) for name, value in values.items() if isinstance(value, type)]
        for path, cls in ahead:
            if cls.__module__ == self.name and cls.__qualname__ == path and len(ahead) < _CLASSES:
                yield path, cls
                attributes = type.__getattribute__(cls, "__dict__")
                ahead += [(f"{path}.{name}", value) for name, value in attributes.items() if isinstance(value, type)]

    def _holder(self, path: str) -> tuple[Any, str]:
        *classes, name = path.split(".")
        holder: Any = self.module
        for one in classes:
            holder = _held(holder, one) if holder is not None else None
            if not isinstance(holder, type):
                return None, name
        return holder, name


def _held(holder: Any, name: str) -> Any:
    attributes = type.__getattribute__(holder, "__dict__") if isinstance(holder, type) else vars(holder)
    return attributes.get(name, MISSING)


_STATES: dict[str, ModuleState] = {}
_PLACES: dict[int, tuple[Any, Place]] = {}
"""identity of what files made → it, and where"""


def state_of(name: str) -> ModuleState:
    return _STATES.setdefault(name, ModuleState(name))


def states() -> list[ModuleState]:
    """The state of each local module that is still loaded."""
    for state in _STATES.values():
        if state.base is not None and state.module is None:
            forget_places(state.name)
            state.base, state.made, state.places = None, None, {}
            state.forget()
    return [state for state in _STATES.values() if state.base is not None and state.module is not None]


def named(name: str) -> ModuleState | None:
    """The state that travels under a name."""
    return _STATES.get(name.removeprefix(MODULE)) if name.startswith(MODULE) else None


def note_place(identity: int, obj: Any, place: Place) -> None:
    _PLACES.setdefault(identity, (obj, place))


def forget_places(module: str) -> None:
    for identity in [identity for identity, (_, place) in _PLACES.items() if place[0] == module]:
        del _PLACES[identity]


def place_of(kind: Kind, obj: Any) -> Place | None:
    place = _PLACES.get(kind.identity(obj)) if _PLACES else None
    return None if place is None else place[1]


def made_at(place: Place) -> Any:
    """What this side's execution of the same text made at a place, or `MISSING`."""
    name, text, way = place
    state = _STATES.get(name)
    return MISSING if state is None or state.text != text else state.places.get(way, MISSING)


class ModuleStateKind(Kind):
    """What was changed in a module by hand, by its functions, or by a cell."""

    name = "module state"

    def make_args(self, node: Node, walk: Sender) -> Any:
        return node.obj.name

    def make(self, args: Any, receiver: Receiver) -> Any:
        if args not in sys.modules:
            with suppress(Exception):  # then it cannot be imported here by anybody else either, who will say so
                importlib.import_module(args)
        return state_of(args)

    def look(self, node: Node, walk: Sender) -> Any:
        state: ModuleState = node.obj
        paths, values = list(state.entries), list(state.entries.values())
        gone = sorted(state.shared - state.entries.keys() - state.refused.keys())
        seen = node.seen
        if seen is not None and seen[0] == paths and same_items(values, seen[1]) and seen[2] == gone:
            return None
        node.seen = paths, values, gone
        return paths, list(map(walk.encode, values)), gone

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        paths, values, gone = state
        own: ModuleState = node.obj
        own.entries = dict(zip(paths, map(receiver.decode, values), strict=True))
        own.shared.update(paths, gone)
        own.set(own.entries, gone)
        node.seen = None


def same(now: Any, then: Any) -> bool:
    """Whether a value is what the file gave: the very object, or an equal one of a type that nobody can change."""
    if now is then:
        return True
    with suppress(Exception):
        return type(now) is type(then) and type(now) in ATOMS and bool(now == then)
    return False


STATE = ModuleStateKind()
