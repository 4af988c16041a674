"""Moves instances of ordinary classes, weak references, and whatever only its own pickle method knows how to move."""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import pickle
import reprlib
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import cloudpickle as cp

import nbtrain.base.humanize as humanize
from nbtrain.base.errors import CannotTravel, text_of
from nbtrain.exchange.kinds import arrays, tensors
from nbtrain.exchange.kinds.base import (
    ATOMS,
    GONE,
    MISSING,
    NOTHING,
    RANKS_REPLACED,
    CompoundKind,
    Handle,
    Kind,
    MakeTwin,
    Node,
    Receiver,
    Sender,
)
from nbtrain.exchange.kinds.changed_class import class_entry, take_class
from nbtrain.exchange.kinds.checksum import memory_checksum
from nbtrain.exchange.kinds.containers import same_items


class InstanceKind(Kind):
    """An object whose state is its `__dict__` and its slots."""

    name = "instance"

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(type(node.obj))

    def make(self, args: Any, receiver: Receiver) -> Any:
        cls = receiver.decode(args)
        return cls.__new__(cls)

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        """Names and values of what it holds."""
        attributes = raw_attribute(obj, "__dict__", {})
        keys, values = list(attributes), list(attributes.values())
        for slot in slots_of(type(obj)):
            value = raw_attribute(obj, slot)
            if value is not MISSING:
                keys.append(slot)
                values.append(value)
        return keys, values

    def look(self, node: Node, walk: Sender) -> Any:
        keys, values = self.fields(node.obj)
        seen, cls = node.seen, type(node.obj)
        if seen is not None and keys == seen[0] and same_items(values, seen[1]) and cls is seen[2]:
            return None
        node.seen = keys, values, cls
        also = class_entry(cls, seen[2] if seen is not None else None, walk)
        return [*keys, *also], [*map(walk.encode, values), *also.values()]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        obj = node.obj
        fields = dict(zip(state[0], map(receiver.decode, state[1]), strict=True))
        take_class(obj, type(obj), fields)
        slots = slots_of(type(obj))
        for slot in slots:
            if slot in fields:
                object.__setattr__(obj, slot, fields.pop(slot))
            elif raw_attribute(obj, slot) is not MISSING:
                object.__delattr__(obj, slot)
        attributes = raw_attribute(obj, "__dict__", None)
        if attributes is not None:
            for key in [key for key in self.fields(obj)[0] if key not in fields and key in attributes]:
                del attributes[key]
            attributes.update(fields)
        node.seen = None


def raw_attribute(obj: Any, name: str, missing: Any = MISSING) -> Any:
    """An attribute that the object holds itself: a `__getattr__` of its class is not asked."""
    try:
        return object.__getattribute__(obj, name)
    except AttributeError:
        return missing


def slots_of(cls: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                mangled = slot.startswith("__") and not slot.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{slot}" if mangled else slot)
    return tuple(names)


def sent_before(node: Node, receiver: Receiver, names: Callable[[Any], Iterable[str]]) -> list[str]:
    """The attributes of the receiver's object that its class lets travel: those that the sender has sent before. What a
    `__getstate__` leaves out is each side's own, and stays."""
    if receiver.table.nodes.get(node.key) is not node:
        return []  # it is being made
    try:
        return list(names(node.obj))
    except Exception:  # the user's own method may raise anything; who next sends the object says so
        return []


class StatefulKind(InstanceKind):
    """An instance whose class has its own `__getstate__`: it says what of it may travel (a dict)."""

    name = "stateful"

    def put_order(self, obj: Any) -> int:
        return 2

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        try:
            state = obj.__getstate__()
            return list(state), list(state.values())
        except Exception as error:  # the user's own method may raise anything
            raise CannotTravel(f"its __getstate__ raised {type(error).__name__}: {text_of(error)}") from error

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        fields = dict(zip(state[0], map(receiver.decode, state[1]), strict=True))
        take_class(node.obj, type(node.obj), fields)
        attributes = raw_attribute(node.obj, "__dict__", {})
        for key in sent_before(node, receiver, lambda obj: self.fields(obj)[0]):
            if key not in fields:
                attributes.pop(key, None)
        if hasattr(node.obj, "__setstate__"):
            node.obj.__setstate__(fields)
        else:
            vars(node.obj).update(fields)
        node.seen = None


def plain_instance(obj: Any) -> Kind | None:
    """The kind of an object that pickles in Python's standard way, else None."""
    cls: Any = type(obj)
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return None
    if hasattr(cls, "__getnewargs_ex__") or hasattr(cls, "__getnewargs__") or cls in copyreg.dispatch_table:
        return None
    if getattr(getattr(cls, "__getstate__", None), "__module__", "") == "dataclasses":
        return INSTANCE  # frozen with slots: it says no more than its slots do
    own_state = getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
    try:
        reduced = obj.__reduce_ex__(4)
    except Exception:  # whatever its own methods raise: the pickle check will say it
        return None
    maker, args, state, items, pairs = (*reduced, None, None, None)[:5]
    if getattr(maker, "__name__", "") != "__newobj__" or len(args) != 1 or items is not None or pairs is not None:
        return None
    if own_state:
        return STATEFUL if isinstance(state, dict) and _steady(state, obj.__getstate__()) else None
    return None if hasattr(cls, "__setstate__") else INSTANCE


def _steady(state: Any, again: Any) -> bool:
    """Whether `__getstate__` hands out what the object holds, and not copies made for the occasion."""
    return isinstance(again, dict) and all(type(v) in ATOMS or again.get(k) is v for k, v in state.items())


def sentinel(obj: Any) -> bool:
    """Whether a library keeps this object as *the* one of its kind (`dataclasses.MISSING`): then it travels by name."""
    cls = type(obj)
    if not cls.__name__.startswith("_") and INSTANCE.fields(obj)[0]:
        return False  # it holds something, and a program may change that
    return _home(obj) is not None


def _home(obj: Any) -> tuple[Any, str] | None:
    """The module of its class that keeps it, and the name there. A bare `object()` may be any module's."""
    if type(obj) is object:
        place = _bare().get(id(obj))
        return place if place is not None and vars(place[0]).get(place[1]) is obj else None
    module = sys.modules.get(type(obj).__module__)
    if module is None or module.__name__ == "__main__":
        return None
    return next(((module, name) for name, value in list(vars(module).items()) if value is obj), None)


_bare_ones: tuple[int, dict[int, tuple[Any, str]]] = (0, {})


def _bare() -> dict[int, tuple[Any, str]]:
    """The bare `object()`s of all modules, by their ids; looked for when there are more modules than before."""
    global _bare_ones
    if _bare_ones[0] != len(sys.modules):
        places = {
            id(value): (module, name)
            for module in list(sys.modules.values())
            if type(module) is ModuleType
            and module.__name__ != "__main__"
            and sys.modules.get(module.__name__) is module
            for name, value in list(vars(module).items())
            if type(value) is object
        }
        _bare_ones = len(sys.modules), places
    return _bare_ones[1]


def _sentinel_parts(obj: Any) -> tuple[Any, ...]:
    home = _home(obj)
    if home is None:  # since a moment ago
        raise CannotTravel("it was the one of its kind in a module, and is so no more")
    return home


def _enum_member_parts(obj: Any) -> tuple[Any, ...]:
    cls: type[enum.Enum] = type(obj)
    named = obj.name in cls.__members__
    return cls, named, obj.name if named else obj.value


def twin(key: int) -> Any:
    """Stands for a node inside an opaque object's pickle; the receiver's unpickler resolves it."""
    raise pickle.UnpicklingError("only nbtrain's own unpickler resolves twins")


class _Pickler(cp.Pickler):
    """An object's own pickle, where what both sides know stays itself.

    Arrays and containers that nobody knew before go by value: most pickle methods make them up on the spot.
    """

    def __init__(self, file: io.BytesIO, walk: Sender, top: Any, buffers: list[memoryview]) -> None:
        def collect(buffer: pickle.PickleBuffer) -> bool:
            buffers.append(buffer.raw())
            return False  # not in the stream

        super().__init__(file, protocol=5, buffer_callback=collect)
        self.walk = walk
        self.top = top

    def reducer_override(self, obj: Any) -> Any:
        if obj is self.top and arrays.has_attributes(obj):
            return arrays.array_with_attributes(obj)
        if tensors.is_far(obj) and (obj is self.top or not self.walk.table.find(obj)):
            return tensors.tensor_by_value(obj)
        if obj is not self.top:
            kind = self.walk.kind_of(obj, self.walk.namespace)
            if kind is not None and not kind.compound and (kind.lasting or self.walk.table.find(obj)):
                ref = self.walk.encode(obj)
                if ref is None and not self.walk.quiet:
                    raise CannotTravel(f"a {type(obj).__name__} inside it cannot")
                return twin, (ref.key if ref is not None else 0,)
            if kind is tensors.TENSOR:  # torch's own pickle holds an address: never twice the same
                return tensors.tensor_by_value(obj)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, buffers: list[memoryview], receiver: Receiver) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self.receiver = receiver

    def find_class(self, module: str, name: str) -> Any:
        if name == "twin" and module == __name__:
            return self.receiver.whole_twin
        if module == "__main__":
            top, *inner = name.split(".")
            if top not in self.receiver.namespace:
                raise LookupError(f"its pickle names {name!r} of the notebook, and that did not travel with it")
            return functools.reduce(getattr, inner, self.receiver.namespace[top])
        return super().find_class(module, name)


class OpaqueKind(Kind):
    """An object that only its own pickle method can move. Changed, it is made anew, or edited (edit_in_place.py)."""

    name = "opaque"
    whole = True

    def _pickle(self, node: Node, walk: Sender) -> tuple[bytes, list[memoryview], tuple[int, ...]]:
        file = io.BytesIO()
        buffers: list[memoryview] = []
        try:
            _Pickler(file, walk, node.obj, buffers).dump(node.obj)
        except CannotTravel:
            raise
        except RecursionError:
            raise CannotTravel("it is nested too deeply") from None
        except Exception as error:  # any class may raise anything from its own pickle method
            raise CannotTravel(text_of(error) or type(error).__name__) from error
        data = file.getvalue()
        return data, buffers, (zlib.crc32(data), len(data), *map(memory_checksum, buffers))

    def make_args(self, node: Node, walk: Sender) -> Any:
        data, buffers, node.seen = self._pickle(node, walk)
        return data, [] if walk.quiet else list(map(walk.buffer, buffers))

    def make(self, args: Any, receiver: Receiver) -> Any:
        data, where = args
        return _Unpickler(data, list(map(receiver.buffer, where)), receiver).load()

    def look(self, node: Node, walk: Sender) -> Any:
        data, buffers, seen = self._pickle(node, walk)
        if seen == node.seen:
            node.children = walk.children
            return None
        node.seen = seen
        if walk.quiet:
            return NOTHING
        return MakeTwin(node.key, self.name, (data, list(map(walk.buffer, buffers))), anew=True)


def type_name(obj: Any) -> str:
    """The name of its class, as a person would write it."""
    cls = type(obj)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


LONG = 200


class _Short(reprlib.Repr):
    """Of a list of ten million numbers only the first few are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = LONG

    def repr_UntypedStorage(self, storage: Any, level: int) -> str:
        """torch's own has a line for each byte."""
        return f"{humanize.size(storage.nbytes())} on {storage.device}"

    repr_TypedStorage = repr_UntypedStorage


_SHORT = _Short()


class HandleKind(Kind):
    """What stays on the ranks: the notebook holds a handle for it.

    Both sides know which of their common objects it holds: a kept optimizer leads to the notebook's model.
    """

    name = "handle"
    whole = late = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        if type(node.obj) is Handle:
            if node.fixed is None and not walk.quiet and not walk.keep_home:
                raise CannotTravel(GONE)
            return node.obj.type_name, node.obj.text, node.obj.kept
        try:
            text = _SHORT.repr(node.obj)
        except Exception as error:  # a user's __repr__ may raise anything
            text = f"its repr raised {type(error).__name__}"
        stay = walk.staying.get(id(node.obj))
        text = text if len(text) <= LONG else text[: LONG - 1] + "…"
        return type_name(node.obj), text, stay is not None and stay.kept

    def make(self, args: Any, receiver: Receiver) -> Any:
        return Handle(*args)

    def look(self, node: Node, walk: Sender) -> Any:
        if type(node.obj) is Handle:
            if node.obj.lost and not walk.quiet:
                raise CannotTravel(f"{humanize.ranks(sorted(node.obj.lost))} {RANKS_REPLACED}")
            return None
        nodes = walk.known_inside(node.obj)
        keys = [inner.key for inner in nodes]
        if keys == node.seen:
            return None
        node.seen = keys
        return [walk.encode(inner.obj) for inner in nodes]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        node.children = [receiver.node(ref.key) for ref in state]
        if type(node.obj) is Handle:
            node.obj.holds = [child.obj for child in node.children]


INSTANCE = InstanceKind()
STATEFUL = StatefulKind()
OPAQUE = OpaqueKind()
HANDLE = HandleKind()
WEAK_REFERENCE = CompoundKind(
    "weak reference", lambda obj: (obj(),), lambda held: weakref.ref(type("Gone", (), {})() if held is None else held)
)
SENTINEL = CompoundKind("sentinel", _sentinel_parts, getattr)
ENUM_MEMBER = CompoundKind(
    "enum member", _enum_member_parts, lambda cls, named, what: cls[what] if named else cls(what)
)
"""A member of an enum of the notebook: the class over there has its own."""
