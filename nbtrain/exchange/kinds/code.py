"""Functions and classes that the notebook defined. On the other side their globals are that side's namespace."""

from __future__ import annotations

import abc
import functools
import gc
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import cloudpickle.cloudpickle as cp

from nbtrain.errors import CannotTravel
from nbtrain.exchange.kinds.base import Kind

if TYPE_CHECKING:
    from nbtrain.exchange.arrival import Arrival
    from nbtrain.exchange.table import Node
    from nbtrain.exchange.walk import Walk

LRU = type(functools.lru_cache(lambda: 0))
NAMESPACE = "namespace"
NOTE = "__slotnames__"
"""Python notes this on a class whenever an instance is pickled: no change of the user's."""
MADE_BY_PYTHON = {
    NOTE, "__slots__", "__module__", "__dict__", "__weakref__", "__annotate_func__",
    "_abc_impl", "_abc_cache", "_abc_registry", "_abc_negative_cache", "_abc_negative_cache_version",
}  # fmt: skip


def importable(obj: Any) -> bool:
    """A function or class that the other side can import by its name."""
    try:
        return getattr(obj, "__module__", None) != "__main__" and bool(cp._should_pickle_by_reference(obj))
    except TypeError:
        return False


class Function(Kind):
    """A function made in a cell, or a nested one of a library.

    Its closure's cells are nodes, so recursion works and functions that share a `nonlocal` go on sharing it.
    """

    name = "function"
    lasting = True

    def shell(self, node: Node, walk: Walk) -> Any:
        fn: types.FunctionType = node.obj
        cells = tuple(map(walk.encode, fn.__closure__ or ()))
        return fn.__code__, self._globals(fn, walk), fn.__name__, cells

    def _globals(self, fn: types.FunctionType, walk: Walk) -> Any:
        if fn.__globals__ is walk.namespace:
            return NAMESPACE
        module = sys.modules.get(fn.__globals__.get("__name__", ""))
        if module is not None and module.__name__ != "__main__" and vars(module) is fn.__globals__:
            return module
        names = cp._extract_code_globals(fn.__code__)
        known = {name: fn.__globals__[name] for name in ("__name__", *names) if name in fn.__globals__}
        return [(name, walk.encode(value)) for name, value in known.items()]

    def make(self, args: Any, arrival: Arrival) -> Any:
        code, where, name, cells = args
        if where == NAMESPACE:
            globals_ = arrival.namespace
        elif isinstance(where, types.ModuleType):
            globals_ = vars(where)
        else:
            globals_ = {key: arrival.decode(value) for key, value in where}
            globals_["__builtins__"] = __builtins__
        return types.FunctionType(code, globals_, name, None, tuple(map(arrival.decode, cells)) or None)

    def _fields(self, fn: types.FunctionType) -> tuple[Any, ...]:
        extra = (getattr(fn, "__type_params__", ()),) if sys.version_info >= (3, 12) else ()
        annotations = {} if sys.version_info >= (3, 14) else fn.__annotations__
        return (fn.__qualname__, fn.__module__, fn.__doc__, fn.__defaults__, fn.__kwdefaults__ or None,
                annotations or None, *fn.__dict__, *fn.__dict__.values(), *extra)  # fmt: skip

    def look(self, node: Node, walk: Walk) -> Any:
        fn: types.FunctionType = node.obj
        fields = self._fields(fn)
        if node.seen is not None and len(fields) == len(node.seen) and all(map(is_, fields, node.seen)):
            return None
        node.seen = fields
        head, rest = fields[:6], fields[6:]
        count = len(fn.__dict__)
        encoded = tuple(map(walk.encode, (*head[:4], *head[4:])))
        attributes = list(zip(rest[:count], map(walk.encode, rest[count : 2 * count]), strict=True))
        return encoded, attributes, tuple(map(walk.encode, rest[2 * count :]))

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        fn: types.FunctionType = node.obj
        fields, attributes, type_params = state
        decoded = tuple(map(arrival.decode, fields))
        fn.__qualname__, fn.__module__, fn.__doc__, fn.__defaults__, fn.__kwdefaults__ = decoded[:5]
        if decoded[5] is not None:
            fn.__annotations__ = decoded[5]
        fn.__dict__.clear()
        fn.__dict__.update((name, arrival.decode(value)) for name, value in attributes)
        if type_params and type_params[0]:
            fn.__type_params__ = arrival.decode(type_params[0])  # type: ignore[attr-defined]
        node.seen = None

    def address(self, address: str, holder: Any, child: Any) -> str:
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False):
            if cell is child:
                return f"{address} (its closure variable {name!r})"
        code = holder.__code__
        defaults = holder.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][len(code.co_varnames[: code.co_argcount]) - len(defaults) :]
        for name, value in [*zip(names, defaults, strict=True), *(holder.__kwdefaults__ or {}).items()]:
            if value is child:
                return f"{address} (default of its argument {name!r})"
        for name, value in vars(holder).items():
            if value is child:
                return f"{address}.{name}"
        return address


class Cell(Kind):
    """One closure variable."""

    name = "cell"
    lasting = True

    def make(self, args: Any, arrival: Arrival) -> Any:
        return types.CellType()

    def look(self, node: Node, walk: Walk) -> Any:
        try:
            now: tuple[Any, ...] = (node.obj.cell_contents,)
        except ValueError:
            now = ()
        if node.seen is not None and len(now) == len(node.seen) and all(map(is_, now, node.seen)):
            return None
        node.seen = now
        return tuple(map(walk.encode, now))

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        if state:
            node.obj.cell_contents = arrival.decode(state[0])
        else:
            del node.obj.cell_contents
        node.seen = None


class Class(Kind):
    """A class made in a cell. What each side holds under one key is *its* class: methods are never replaced."""

    name = "class"
    lasting = True

    def shell(self, node: Node, walk: Walk) -> Any:
        cls = node.obj
        if _is_enum(cls):
            bases, *rest = cp._enum_getnewargs(cls)
            name, qualname, members, module, _, _ = rest
            keys = list(members)
            values = tuple(map(walk.encode, members.values()))
            return True, tuple(map(walk.encode, bases)), (name, qualname, keys, values, module)
        if type(cls).__module__ == "_ctypes":
            raise CannotTravel("what ctypes makes belongs to the memory of its process")
        meta, name, bases, keywords, _, _ = cp._class_getnewargs(cls)
        keywords = [(key, walk.encode(value)) for key, value in keywords.items()]
        if "_fields" in vars(cls):  # what `typing.NamedTuple` made is an ordinary class
            bases = cls.__bases__
        bases = tuple(map(walk.encode, bases))
        return False, bases, (walk.encode(meta), name, keywords, _slots(cls))

    def make(self, args: Any, arrival: Arrival) -> Any:
        is_enum, bases, rest = args
        bases = tuple(map(arrival.decode, bases))
        if is_enum:
            name, qualname, keys, values, module = rest
            members = dict(zip(keys, map(arrival.decode, values), strict=True))
            return cp._make_skeleton_enum(bases, name, qualname, members, module, None, None)
        meta, name, keywords, slots = rest
        body = {key: arrival.decode(value) for key, value in keywords}
        if slots is not None:
            body["__slots__"] = slots
        with _muted(bases):
            return cp._make_skeleton_class(arrival.decode(meta), name, bases, body, None, None)

    def _body(self, cls: type) -> dict[str, Any]:
        own = cp._enum_getstate(cls)[0] if _is_enum(cls) else vars(cls)
        slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
        state = {
            name: value
            for name, value in own.items()
            if name not in MADE_BY_PYTHON and not (isinstance(value, slots) and value.__objclass__ is cls)
        }
        if isinstance(cls, abc.ABCMeta):
            state["_abc_impl"] = [sub for ref in abc._get_dump(cls)[0] if (sub := ref()) is not None]  # type: ignore[attr-defined]
        return state

    def look(self, node: Node, walk: Walk) -> Any:
        raw: Any = vars(node.obj)
        if NOTE in raw:
            raw = {key: value for key, value in raw.items() if key != NOTE}
        seen = node.seen
        if seen is not None and list(raw) == seen[0] and all(map(is_, raw.values(), seen[1])):
            return None
        node.seen = list(raw), list(raw.values())
        body = self._body(node.obj)
        body["__qualname__"] = node.obj.__qualname__
        registry = body.pop("_abc_impl", None)
        items = [(name, walk.encode(value)) for name, value in body.items()]
        return items, None if registry is None else list(map(walk.encode, registry))

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        cls = node.obj
        items, registry = state
        held = vars(cls)
        body = {name: arrival.decode(value) for name, value in items}
        cls.__qualname__ = body.pop("__qualname__")
        for name in set(self._body(cls)) - set(body) - {"_abc_impl"}:
            if name in held:
                type.__delattr__(cls, name)
        for name, value in body.items():
            if name not in held or held[name] is not value:
                type.__setattr__(cls, name, value)
        for sub in registry or ():
            cls.register(arrival.decode(sub))
        node.seen = None

    def address(self, address: str, holder: Any, child: Any) -> str:
        if child in holder.__bases__:
            return f"{address} (its base class {child.__name__})"
        for name, value in vars(holder).items():
            if value is child or getattr(value, "__func__", None) is child:
                return f"{address}.{name}"
            if isinstance(value, property) and any(f is child for f in (value.fget, value.fset, value.fdel)):
                return f"{address}.{name}"
        return address


def _is_enum(cls: type) -> bool:
    import enum

    return issubclass(cls, enum.Enum)


def _slots(cls: type) -> Any:
    return vars(cls).get("__slots__")


@contextmanager
def _muted(bases: tuple[type, ...]) -> Iterator[None]:
    """No `__init_subclass__` of a notebook: what it did (a registry) arrives as state, and must not be done twice."""
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


class Method(Kind):
    name = "method"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.__func__, obj.__self__

    def join(self, parts: tuple[Any, ...]) -> Any:
        return types.MethodType(*parts)


class BuiltinMethod(Kind):
    """`list.append` of one particular list, `rng.random` of one generator."""

    name = "builtin method"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.__self__, obj.__name__

    def join(self, parts: tuple[Any, ...]) -> Any:
        return getattr(*parts)


class Wrapper(Kind):
    """staticmethod and classmethod objects, as they stand in a class body."""

    compound = True

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__name__

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return (obj.__func__,)

    def join(self, parts: tuple[Any, ...]) -> Any:
        return self.cls(*parts)


class Property(Kind):
    name = "property"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.fget, obj.fset, obj.fdel, obj.__doc__

    def join(self, parts: tuple[Any, ...]) -> Any:
        return property(*parts)


class CachedProperty(Kind):
    """Has a lock on Python 3.10 and 3.11, which is why it cannot be taken as an instance."""

    name = "cached_property"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return obj.func, obj.attrname

    def join(self, parts: tuple[Any, ...]) -> Any:
        made = functools.cached_property(parts[0])
        made.attrname = parts[1]
        return made


class Cached(Kind):
    """`functools.lru_cache`: pickles by name without complaint, and fails on the other side. The cache stays."""

    name = "lru_cache"
    whole = True

    def shell(self, node: Node, walk: Walk) -> Any:
        return walk.encode(node.obj.__wrapped__), sorted(node.obj.cache_parameters().items())

    def make(self, args: Any, arrival: Arrival) -> Any:
        return functools.lru_cache(**dict(args[1]))(arrival.decode(args[0]))

    def look(self, node: Node, walk: Walk) -> Any:
        return None


class Partial(Kind):
    """`functools.partial`: its arguments may be objects that both sides know."""

    name = "partial"

    def shell(self, node: Node, walk: Walk) -> Any:
        return walk.encode(node.obj.func)

    def make(self, args: Any, arrival: Arrival) -> Any:
        return functools.partial(arrival.decode(args))

    def look(self, node: Node, walk: Walk) -> Any:
        made = node.obj
        seen = (*made.args, None, *made.keywords, *made.keywords.values(), None, *vars(made), *vars(made).values())
        if node.seen is not None and len(seen) == len(node.seen) and all(map(is_, seen, node.seen)):
            return None
        node.seen = seen
        fields = [[(key, walk.encode(value)) for key, value in held.items()] for held in (made.keywords, vars(made))]
        return tuple(map(walk.encode, made.args)), *fields

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        args, *fields = state
        keywords, held = ({key: arrival.decode(value) for key, value in field} for field in fields)
        node.obj.__setstate__((node.obj.func, tuple(map(arrival.decode, args)), keywords, held))
        node.seen = None

    def address(self, address: str, holder: Any, child: Any) -> str:
        for index, value in enumerate(holder.args):
            if value is child:
                return f"{address}.args[{index}]"
        for key, value in holder.keywords.items():
            if value is child:
                return f"{address}.keywords[{key!r}]"
        return f"{address}.func"


class NewType(Kind):
    """`typing.NewType`: it too pickles by name."""

    name = "NewType"
    whole = True

    def shell(self, node: Node, walk: Walk) -> Any:
        return node.obj.__name__, node.obj.__module__, walk.encode(node.obj.__supertype__)

    def make(self, args: Any, arrival: Arrival) -> Any:
        new: Any = typing.NewType
        made = new(args[0], arrival.decode(args[2]))
        made.__module__ = args[1]
        return made

    def look(self, node: Node, walk: Walk) -> Any:
        return None


class Proxy(Kind):
    """A read-only view of a dict: the dict is what both sides know."""

    name = "mappingproxy"
    compound = True

    def parts(self, obj: Any) -> tuple[Any, ...]:
        return (gc.get_referents(obj)[0],)

    def join(self, parts: tuple[Any, ...]) -> Any:
        return types.MappingProxyType(parts[0])


class Running(Kind):
    """Generators, coroutines, frames: they hold a running frame."""

    name = "running frame"

    def shell(self, node: Node, walk: Walk) -> Any:
        raise CannotTravel(f"a {type(node.obj).__name__} holds a running frame")


KINDS: dict[type, Kind] = {
    types.FunctionType: Function(), types.CellType: Cell(), types.MethodType: Method(),
    staticmethod: Wrapper(staticmethod), classmethod: Wrapper(classmethod), property: Property(),
    functools.cached_property: CachedProperty(), LRU: Cached(), functools.partial: Partial(),
    types.MappingProxyType: Proxy(), typing.NewType: NewType(),
    **dict.fromkeys(
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.TracebackType),
        Running(),
    ),
}  # fmt: skip
CLASS = Class()
BUILTIN_METHOD = BuiltinMethod()
