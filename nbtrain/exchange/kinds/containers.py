"""Moves lists, dicts, sets, deques and bytearrays; tuples, inside their holder; and long strings and tuples."""

from __future__ import annotations

import collections
import io
import pickle
import types
import weakref
import zlib
from operator import is_
from typing import Any

from nbtrain.exchange.kinds.base import ATOMS, CompoundKind, Kind, Node, Receiver, Sender

LARGE = 4096
"""From this length on, a container of plain data (numbers, text, lists and dicts of them) is one block:
its inner lists have no identity of their own on the other side. Walking a million of them would take seconds."""
LONG_TEXT = 1 << 14
"""Characters or bytes from which a string is a long constant."""
LONG_TUPLE = 256
"""Items from which a tuple may be one."""


class _PlainPickler(pickle.Pickler):
    """Pickles builtin containers and atoms only, at C speed."""

    def reducer_override(self, obj: Any) -> Any:
        raise TypeError("not plain data")


def plain_bytes(obj: Any) -> bytes | None:
    """The pickle of a container that holds plain data only, else None."""
    file = io.BytesIO()
    try:
        _PlainPickler(file, 5).dump(obj)
    except (RecursionError, pickle.PicklingError, TypeError):
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
    """Whether these are the very same objects in the same order."""
    return len(now) == len(seen) and all(map(is_, now, seen))


class SequenceKind(Kind):
    """Lists, deques and sets."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__name__

    def put_order(self, obj: Any) -> int:
        return 1 if self.cls is set else 0

    def make_args(self, node: Node, walk: Sender) -> Any:
        return getattr(node.obj, "maxlen", None)  # of a deque

    def make(self, args: Any, receiver: Receiver) -> Any:
        return self.cls() if args is None else self.cls((), args)

    def look(self, node: Node, walk: Sender) -> Any:
        obj, seen = node.obj, node.seen
        if type(seen) is list and same_items(obj, seen):
            return None
        if len(obj) >= LARGE and (data := plain_bytes(list(obj))) is not None:
            return _new_block(node, data)
        node.seen = list(obj)
        return node.seen if set(map(type, obj)) <= ATOMS else list(map(walk.encode, node.seen))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        block = type(state) is bytes
        fill(self.cls, node.obj, pickle.loads(state) if block else list(map(receiver.decode, state)))
        node.seen = Block(state) if block else None


class DictKind(Kind):
    """Dicts of every standard kind except ordered ones; their order is kept. What is weak here is weak there: an entry
    that only this holds up is gone once it has arrived."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__name__

    def put_order(self, obj: Any) -> int:
        return 1

    def make(self, args: Any, receiver: Receiver) -> Any:
        return self.cls()

    def look(self, node: Node, walk: Sender) -> Any:
        obj, seen = node.obj, node.seen
        if type(seen) is tuple and same_items(list(obj), seen[0]) and same_items(list(obj.values()), seen[1]):
            return None
        if len(obj) >= LARGE and (data := plain_bytes(dict(obj))) is not None:
            return _new_block(node, data)
        keys, values = list(obj), list(obj.values())
        node.seen = keys, values
        return list(map(walk.encode, keys)), list(map(walk.encode, values))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        block = type(state) is bytes
        items: Any = pickle.loads(state).items() if block else decoded_items(state, receiver)
        fill(self.cls, node.obj, items)
        node.seen = Block(state) if block else None


class DefaultDictKind(DictKind):
    """A defaultdict: its items as those of a dict, and its factory, which may be set at any time."""

    def look(self, node: Node, walk: Sender) -> Any:
        before, factory = node.seen, node.obj.default_factory
        known, node.seen = before or (None, None)
        state = super().look(node, walk)
        if state is None:
            if factory is known:
                node.seen = before
                return None
            node.seen = None  # whoever is sent anything is sent all of it
            state = super().look(node, walk)
        node.seen = factory, node.seen
        return walk.encode(factory), state

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        factory = receiver.decode(state[0])
        super().put(node, state[1], receiver)
        node.obj.default_factory = factory
        if node.seen is not None:
            node.seen = factory, node.seen


def decoded_items(state: Any, receiver: Receiver) -> list[tuple[Any, Any]]:
    """The items of a dict; all are decoded before it is emptied."""
    return list(zip(map(receiver.decode, state[0]), map(receiver.decode, state[1]), strict=True))


def fill(base: Any, obj: Any, items: Any) -> None:
    """Give a container other items. Methods of a subclass are not asked."""
    if base is list:
        list.__setitem__(obj, slice(None), items)
        return
    base.clear(obj)
    if base is set:
        set.update(obj, items)
    elif base is collections.deque:
        collections.deque.extend(obj, items)
    else:
        for key, value in items:
            base.__setitem__(obj, key, value)


def _new_block(node: Node, data: bytes) -> bytes | None:
    """What is sent of a large container, if its plain data changed."""
    block = Block(data)
    if block.same(node.seen):
        return None
    node.seen = block
    return data


class ByteArrayKind(Kind):
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


class LongConstantKind(Kind):
    """Long strings, bytes and tuples of such values: known by their identity, so that each rank gets them once and
    nobody compares them again."""

    name = "frozen"
    whole = constant = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        if walk.quiet:
            return None
        obj = node.obj
        if type(obj) is bytes:
            return "bytes", walk.buffer(memoryview(obj))
        return "other", walk.buffer(memoryview(pickle.dumps(obj, 5)))

    def make(self, args: Any, receiver: Receiver) -> Any:
        form, where = args
        data = receiver.buffer(where)
        return bytes(data) if form == "bytes" else pickle.loads(data)


def is_long(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is a long constant: of nothing but atoms and tuples of them."""
    return len(value) >= LONG_TUPLE and _constant(value)


def _constant(value: tuple[Any, ...]) -> bool:
    return all(
        (type(part) in ATOMS and type(part) is not types.ModuleType) or (type(part) is tuple and _constant(part))
        for part in value
    )


def _tuple_subclass(cls: Any, *values: Any) -> Any:
    # `torch.Size` insists on its own; a class of the user's may want other arguments, or be half made.
    return tuple.__new__(cls, values) if isinstance(cls.__new__, types.FunctionType) else cls.__new__(cls, values)


def _tuple_with_attributes(attributes: dict[str, Any], cls: Any, *values: Any) -> Any:
    made = _tuple_subclass(cls, *values)
    made.__dict__ = attributes
    return made


KINDS: dict[type, Kind] = {
    list: SequenceKind(list), collections.deque: SequenceKind(collections.deque), set: SequenceKind(set),
    dict: DictKind(dict), collections.Counter: DictKind(collections.Counter),
    collections.defaultdict: DefaultDictKind(collections.defaultdict),
    weakref.WeakKeyDictionary: DictKind(weakref.WeakKeyDictionary),
    weakref.WeakValueDictionary: DictKind(weakref.WeakValueDictionary), bytearray: ByteArrayKind(),
    tuple: CompoundKind("tuple", tuple, lambda *parts: parts),
    frozenset: CompoundKind("frozenset", tuple, lambda *parts: frozenset(parts)),
    slice: CompoundKind("slice", lambda obj: (obj.start, obj.stop, obj.step), slice),
}  # fmt: skip
LONG_CONSTANT = LongConstantKind()
TUPLE_SUBCLASS = CompoundKind("tuple subclass", lambda obj: (type(obj), *obj), _tuple_subclass)
"""Named tuples, torch.Size and other subclasses."""
TUPLE_WITH_ATTRIBUTES = CompoundKind(
    "tuple with attributes", lambda obj: (obj.__dict__, type(obj), *obj), _tuple_with_attributes
)
"""The same with attributes: their dict is what both sides know."""
