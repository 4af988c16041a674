"""Moves ordered dicts, and subclasses of list, dict, set and deque: containers with attributes of their own.

Methods of the class itself are not asked: what it holds is moved, not what it would like to be given.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from nbtrain.exchange.kinds.base import Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.changed_class import class_entry
from nbtrain.exchange.kinds.containers import DictKind, SequenceKind, decoded_items, fill, same_items
from nbtrain.exchange.kinds.objects import INSTANCE


class ContainerSubclassKind(Kind):
    """A container that holds what a plain one of its base does, and what an instance does."""

    def __init__(self, base: Any) -> None:
        self.name = f"{base.__name__} with attributes"
        self.base = base
        self.items: Kind = DictKind(dict) if issubclass(base, dict) else SequenceKind(list)
        """how the base's own are looked at"""

    def put_order(self, obj: Any) -> int:
        return 0 if self.base in (list, deque) else 1

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(type(node.obj)), getattr(node.obj, "maxlen", None) if self.base is deque else None

    def make(self, args: Any, receiver: Receiver) -> Any:
        cls, length = args
        obj = self.base.__new__(receiver.decode(cls))
        if self.base is deque:
            deque.__init__(obj, (), length)
        return obj

    def look(self, node: Node, walk: Sender) -> Any:
        obj = node.obj
        keys, values = INSTANCE.fields(obj)
        if self.base is defaultdict:
            keys, values = ["default_factory", *keys], [obj.default_factory, *values]
        items, seen_keys, seen_values, before = node.seen or (None, None, (), None)
        plain = dict(self.base.items(obj)) if issubclass(self.base, dict) else list(self.base.__iter__(obj))
        now = Node(0, plain, self.items)
        now.seen = items
        state = self.items.look(now, walk)
        if state is None:
            if keys == seen_keys and same_items(values, seen_values) and type(obj) is before:
                return None
            now.seen = None  # whoever is sent anything is sent all of it
            state = self.items.look(now, walk)
        node.seen = now.seen, keys, values, type(obj)
        also = class_entry(type(obj), before, walk)
        return state, [*keys, *also], [*map(walk.encode, values), *also.values()]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        items, keys, values = state
        if type(items) is bytes:
            content = pickle.loads(items)
            content = content.items() if type(content) is dict else content
        elif issubclass(self.base, dict):
            content = decoded_items(items, receiver)
        else:
            content = list(map(receiver.decode, items))
        fill(self.base, node.obj, content)
        if self.base is defaultdict:
            node.obj.default_factory = receiver.decode(values[0])
            keys, values = keys[1:], values[1:]
        INSTANCE.put(node, (keys, values), receiver)


KINDS: dict[type, ContainerSubclassKind] = {  # derived ones before their bases
    base: ContainerSubclassKind(base) for base in (OrderedDict, defaultdict, dict, list, set, deque)
}
ORDERED = KINDS[OrderedDict]
"""`model.state_dict()` keeps its versions in an attribute."""


def kind_of(obj: Any) -> Kind | None:
    """The kind of a container with attributes; None for a class that pickles in a way of its own."""
    cls: Any = type(obj)
    base = next((base for base in KINDS if isinstance(obj, base)), None)
    if base is None or cls.__reduce_ex__ is not object.__reduce_ex__ or cls in copyreg.dispatch_table:
        return None
    if cls.__reduce__ not in (object.__reduce__, base.__reduce__, Counter.__reduce__):
        return None
    if getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None):
        return None
    if any(hasattr(cls, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__")):
        return None
    return KINDS[base]
