"""Moves classes that the notebook defined: each side has its own under a key, and goes on using it."""

from __future__ import annotations

import abc
import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.compat import pickling, python
from nbtrain.exchange.kinds.base import Kind, Node, Receiver, Sender

NOTE = "__slotnames__"
"""Python notes this on a class whenever an instance is pickled: no change of the user's."""
MADE_BY_PYTHON = {NOTE, "__slots__", "__module__", "__dict__", "__weakref__", "__annotate_func__", *python.OF_CLASSES}


class ClassKind(Kind):
    """A class made in a cell. What each side holds under one key is *its* class: methods are never replaced."""

    name = "class"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        cls = node.obj
        if _is_enum(cls):
            bases, *rest = pickling.enum_arguments(cls)
            name, qualname, _, module, _, _ = rest
            keys = list(cls.__members__)  # with the second names, which iterating leaves out
            values = tuple(walk.encode(member.value) for member in cls.__members__.values())
            return True, tuple(map(walk.encode, bases)), (name, qualname, keys, values, module)
        if type(cls).__module__ == python.OF_CTYPES:
            raise CannotTravel("what ctypes makes belongs to the memory of its process")
        meta, name, bases, keywords, _, _ = pickling.class_arguments(cls)
        keywords = [(key, walk.encode(value)) for key, value in keywords.items()]
        if "_fields" in vars(cls):  # what `typing.NamedTuple` made is an ordinary class
            bases = cls.__bases__
        bases = tuple(map(walk.encode, bases))
        return False, bases, (walk.encode(meta), name, keywords, vars(cls).get("__slots__"))

    def make(self, args: Any, receiver: Receiver) -> Any:
        is_enum, bases, rest = args
        bases = tuple(map(receiver.decode, bases))
        if is_enum:
            name, qualname, keys, values, module = rest
            members = dict(zip(keys, map(receiver.decode, values), strict=True))
            return pickling.make_enum(bases, name, qualname, members, module)
        meta, name, keywords, slots = rest
        body = {key: receiver.decode(value) for key, value in keywords}
        if slots is not None:
            body["__slots__"] = slots
        with _muted(bases):
            made = pickling.make_class(receiver.decode(meta), name, bases, body)
        if isinstance(made, abc.ABCMeta):  # its methods come later, its instances need not wait for them
            made.__abstractmethods__ = frozenset()
        return made

    def _body(self, cls: type) -> dict[str, Any]:
        own = pickling.enum_body(cls) if _is_enum(cls) else vars(cls)
        slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
        state = {
            name: value
            for name, value in own.items()
            if name not in MADE_BY_PYTHON and not (isinstance(value, slots) and value.__objclass__ is cls)
        }
        if isinstance(cls, abc.ABCMeta):
            state[python.ABC_REGISTRY] = python.registered(cls)
        return state

    def look(self, node: Node, walk: Sender) -> Any:
        raw: Any = vars(node.obj)
        if NOTE in raw:
            raw = {key: value for key, value in raw.items() if key != NOTE}
        members = _members(node.obj)
        names, values = [*raw, *(name for name, _ in members)], [*raw.values(), *(value for _, value in members)]
        seen = node.seen
        if seen is not None and names == seen[0] and all(map(is_, values, seen[1])):
            return None
        node.seen = names, values
        body = self._body(node.obj)
        body["__qualname__"] = node.obj.__qualname__
        registry = body.pop(python.ABC_REGISTRY, None)
        items = [(name, walk.encode(value)) for name, value in body.items()]
        of_members = [(name, walk.encode(value)) for name, value in members]
        return items, None if registry is None else list(map(walk.encode, registry)), of_members

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        cls = node.obj
        items, registry, members = state
        attributes = vars(cls)
        body = {name: receiver.decode(value) for name, value in items}
        cls.__qualname__ = body.pop("__qualname__")
        for name in set(self._body(cls)) - set(body) - {python.ABC_REGISTRY}:
            if name in attributes:
                type.__delattr__(cls, name)
        for name, value in body.items():
            if name not in attributes or attributes[name] is not value:
                type.__setattr__(cls, name, value)
        for sub in registry or ():
            cls.register(receiver.decode(sub))
        there = {name: receiver.decode(value) for name, value in members}
        for name, attribute in [name for name, _ in _members(cls) if name not in there]:
            del vars(cls.__members__[name])[attribute]
        for (name, attribute), value in there.items():
            vars(cls.__members__[name])[attribute] = value
        node.seen = None


def _is_enum(cls: type) -> bool:
    return issubclass(cls, enum.Enum)


def _members(cls: Any) -> list[tuple[tuple[str, str], Any]]:
    """The attributes that members of an enum got from its `__init__`."""
    if not _is_enum(cls):
        return []
    items = [(name, *item) for name, member in cls.__members__.items() for item in vars(member).items()]
    return [((name, attribute), value) for name, attribute, value in items if attribute not in python.OF_ENUM_MEMBERS]


@contextmanager
def _muted(bases: tuple[type, ...]) -> Iterator[None]:
    """Silences `__init_subclass__` of notebook classes: what it did (a registry) arrives as state, not twice."""
    silenced: list[tuple[type, Any]] = []
    for base in dict.fromkeys(c for b in types.resolve_bases(bases) for c in b.__mro__):
        hook = vars(base).get("__init_subclass__")
        if hook is not None and getattr(getattr(hook, "__func__", None), "__module__", None) == "__main__":
            silenced.append((base, hook))
            type.__setattr__(base, "__init_subclass__", classmethod(lambda cls, **_: None))
    try:
        yield
    finally:
        for base, hook in silenced:
            type.__setattr__(base, "__init_subclass__", hook)


CLASS = ClassKind()
