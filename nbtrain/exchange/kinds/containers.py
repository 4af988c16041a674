"""Lists, dicts, sets, deques, bytearrays; and tuples, which travel inside whatever holds them."""

from __future__ import annotations

import collections
import io
import pickle
import types
import weakref
import zlib
from operator import is_
from typing import Any

from nbtrain.exchange.kinds.base import ATOMS, Kind, Node, Receiver, Sender

LARGE = 4096
"""From this length on, a container of plain data (numbers, text, lists and dicts of them) is one block:
its inner lists have no identity of their own on the other side. Walking a million of them would take seconds."""


class _Refused(Exception):
    pass


class _PlainPickler(pickle.Pickler):
    """Builtin containers and atoms only, at C speed."""

    def reducer_override(self, obj: Any) -> Any:
        raise _Refused


def plain_bytes(obj: Any) -> bytes | None:
    """The pickle of a container that holds plain data only, else None."""
    file = io.BytesIO()
    try:
        _PlainPickler(file, 5).dump(obj)
    except (_Refused, RecursionError, pickle.PicklingError, TypeError):
        return None
    return file.getvalue()


class Block:
    """What a large container of plain data looked like."""

    __slots__ = ("crc", "size")

    def __init__(self, data: bytes) -> None:
        self.crc = zlib.crc32(data)
        self.size = len(data)

    def same(self, other: Any) -> bool:
        return type(other) is Block and (other.crc, other.size) == (self.crc, self.size)


def same_items(now: Any, seen: Any) -> bool:
    """The very same objects in the same order."""
    return len(now) == len(seen) and all(map(is_, now, seen))


def atomic(values: Any) -> bool:
    return set(map(type, values)) <= ATOMS


class Sequence(Kind):
    """Lists and deques."""

    name = "list"

    def make(self, args: Any, receiver: Receiver) -> Any:
        return []

    def look(self, node: Node, walk: Sender) -> Any:
        obj, seen = node.obj, node.seen
        if type(seen) is list and same_items(obj, seen):
            return None
        if len(obj) >= LARGE and (data := plain_bytes(list(obj))) is not None:
            block = Block(data)
            if block.same(seen):
                return None
            node.seen = block
            return data
        node.seen = list(obj)
        return node.seen if atomic(obj) else list(map(walk.encode, node.seen))

    def values(self, state: Any, receiver: Receiver) -> list[Any]:
        if type(state) is bytes:
            return pickle.loads(state)  # type: ignore[no-any-return]
        return list(map(receiver.decode, state))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        node.obj[:] = self.values(state, receiver)
        node.seen = Block(state) if type(state) is bytes else None


class Deque(Sequence):
    name = "deque"

    def shell(self, node: Node, walk: Sender) -> Any:
        return node.obj.maxlen

    def make(self, args: Any, receiver: Receiver) -> Any:
        return collections.deque(maxlen=args)

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        values = self.values(state, receiver)
        node.obj.clear()
        node.obj.extend(values)
        node.seen = Block(state) if type(state) is bytes else None


class Set(Sequence):
    name = "set"

    def turn(self, obj: Any) -> int:
        return 1

    def make(self, args: Any, receiver: Receiver) -> Any:
        return set()

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        values = self.values(state, receiver)
        node.obj.clear()
        node.obj.update(values)
        node.seen = Block(state) if type(state) is bytes else None


class Mapping(Kind):
    """Dicts of every standard kind, but for ordered ones; their order is kept."""

    name = "dict"

    def turn(self, obj: Any) -> int:
        return 1

    def make(self, args: Any, receiver: Receiver) -> Any:
        return {}

    def look(self, node: Node, walk: Sender) -> Any:
        obj, seen = node.obj, node.seen
        if type(seen) is tuple and same_items(list(obj), seen[0]) and same_items(list(obj.values()), seen[1]):
            return None
        if len(obj) >= LARGE and (data := plain_bytes(dict(obj))) is not None:
            block = Block(data)
            if block.same(seen):
                return None
            node.seen = block
            return data
        keys, values = list(obj), list(obj.values())
        node.seen = keys, values
        return list(map(walk.encode, keys)), list(map(walk.encode, values))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        if type(state) is bytes:
            items = list(pickle.loads(state).items())
            node.seen = Block(state)
        else:
            items = list(zip(map(receiver.decode, state[0]), map(receiver.decode, state[1]), strict=True))
            node.seen = None
        node.obj.clear()
        for key, value in items:
            node.obj[key] = value


class Counter(Mapping):
    name = "Counter"

    def make(self, args: Any, receiver: Receiver) -> Any:
        return collections.Counter()


class Default(Mapping):
    name = "defaultdict"

    def shell(self, node: Node, walk: Sender) -> Any:
        return walk.encode(node.obj.default_factory)

    def make(self, args: Any, receiver: Receiver) -> Any:
        return collections.defaultdict(receiver.decode(args))


class WeakKeys(Mapping):
    """What is weak here is weak there: an entry that only this holds up is gone once it has arrived."""

    name = "WeakKeyDictionary"

    def make(self, args: Any, receiver: Receiver) -> Any:
        return weakref.WeakKeyDictionary()


class WeakValues(Mapping):
    name = "WeakValueDictionary"

    def make(self, args: Any, receiver: Receiver) -> Any:
        return weakref.WeakValueDictionary()


class Bytes(Kind):
    name = "bytearray"

    def make(self, args: Any, receiver: Receiver) -> Any:
        return bytearray()

    def look(self, node: Node, walk: Sender) -> Any:
        seen = zlib.crc32(node.obj), len(node.obj)
        if seen == node.seen:
            return None
        node.seen = seen
        return bytes(node.obj)

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        node.obj[:] = state
        node.seen = zlib.crc32(state), len(state)


class Tuple(Kind):
    name = "tuple"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return tuple(obj)

    def join(self, parts: tuple[Any, ...]) -> Any:
        return parts


class FrozenSet(Tuple):
    name = "frozenset"

    def join(self, parts: tuple[Any, ...]) -> Any:
        return frozenset(parts)


class Named(Kind):
    """Named tuples, torch.Size and whatever else is a tuple by birth."""

    name = "tuple subclass"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return type(obj), *obj

    def join(self, parts: tuple[Any, ...]) -> Any:
        cls, *values = parts
        # `torch.Size` insists on its own; a class of the user's may want other arguments, or be half made.
        return tuple.__new__(cls, values) if isinstance(cls.__new__, types.FunctionType) else cls.__new__(cls, values)


class Noted(Kind):
    """The same with attributes: the dict of these is what both sides know."""

    name = "tuple with attributes"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.__dict__, type(obj), *obj

    def join(self, parts: tuple[Any, ...]) -> Any:
        held, *rest = parts
        made = NAMED.join(tuple(rest))
        made.__dict__ = held
        return made


class Slice(Kind):
    name = "slice"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.start, obj.stop, obj.step

    def join(self, parts: tuple[Any, ...]) -> Any:
        return slice(*parts)


KINDS: dict[type, Kind] = {
    list: Sequence(), collections.deque: Deque(), set: Set(), dict: Mapping(), bytearray: Bytes(),
    collections.Counter: Counter(), collections.defaultdict: Default(),
    weakref.WeakKeyDictionary: WeakKeys(), weakref.WeakValueDictionary: WeakValues(),
    tuple: Tuple(), frozenset: FrozenSet(), slice: Slice(),
}  # fmt: skip
NAMED = Named()
NOTED = Noted()
