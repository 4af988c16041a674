"""Moves functions that the notebook defined, and what wraps them. Their globals are the namespace of each side."""

from __future__ import annotations

import functools
import gc
import operator
import sys
import types
import typing
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.compat import pickling, python
from nbtrain.compat.intercept import at, imported_as
from nbtrain.exchange.kinds.base import CompoundKind, Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.containers import same_items

MANY = 256
"""Results from which on they are taken for numbers and text: nobody has so many models."""


class LruCacheKind(Kind):
    """`functools.lru_cache`, which pickles by name and then fails on the other side. Its results are computed again
    there; one that is trained (`get_model()`) is refused, or each side would train another."""

    name = "lru_cache"

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(node.obj.__wrapped__), sorted(node.obj.cache_parameters().items())

    def make(self, args: Any, receiver: Receiver) -> Any:
        return functools.lru_cache(**dict(args[1]))(receiver.decode(args[0]))

    def look(self, node: Node, walk: Sender) -> Any:
        if kept := _trained(node.obj):
            name = getattr(node.obj, "__name__", "get_model")  # a partial has none
            raise CannotTravel(
                f"its lru_cache keeps a {kept}, and each side would train its own. Give what it returns a name "
                f"(model = {name}()), call {name}.cache_clear(), and use the name in the cell"
            )
        seen = *vars(node.obj), *vars(node.obj).values()
        if node.seen is not None and same_items(seen, node.seen):
            return None
        node.seen = seen
        return [(name, walk.encode(value)) for name, value in vars(node.obj).items()]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        fields = {name: receiver.decode(value) for name, value in state}
        vars(node.obj).clear()
        vars(node.obj).update(fields)
        node.seen = None


def _trained(function: Any) -> str:
    """What a cache holds that is trained: the class of a model, an optimizer or a parameter among its results."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not 0 < function.cache_info().currsize < MANY:
        return ""
    held = [value for value in gc.get_referents(function) if value is not vars(function)]
    keys = {id(key) for table in held if type(table) is dict for key in table}  # what it was called with
    return next(filter(None, (_with_weights(value, torch) for value in held if id(value) not in keys)), "")


def _with_weights(value: Any, torch: Any) -> str:
    if isinstance(value, tuple | list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return next(filter(None, (_with_weights(item, torch) for item in inner)), "")
    lasting = torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
    trained = isinstance(value, lasting) or (isinstance(value, torch.Tensor) and value.requires_grad)
    return type(value).__name__ if trained else ""


NAMESPACE = "namespace"


def importable(obj: Any) -> bool:
    """Whether the other side can import this function or class by its name."""
    try:
        return getattr(obj, "__module__", None) != "__main__" and pickling.goes_by_name(obj)
    except TypeError:
        return False


class FunctionKind(Kind):
    """A function made in a cell, or a nested one of a library.

    Its closure's cells are nodes, so recursion works and functions that share a `nonlocal` go on sharing it.
    """

    name = "function"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        fn: types.FunctionType = node.obj
        cells = tuple(map(walk.encode, fn.__closure__ or ()))
        return fn.__code__, self._globals(fn, walk), fn.__name__, cells

    def _globals(self, fn: types.FunctionType, walk: Sender) -> Any:
        if fn.__globals__ is walk.namespace:
            return NAMESPACE
        module = sys.modules.get(fn.__globals__.get("__name__", ""))
        if module is not None and module.__name__ != "__main__" and vars(module) is fn.__globals__:
            return module
        names = pickling.globals_in(fn.__code__)
        known = {name: fn.__globals__[name] for name in ("__name__", *names) if name in fn.__globals__}
        return [(name, walk.encode(value)) for name, value in known.items()]

    def make(self, args: Any, receiver: Receiver) -> Any:
        code, where, name, cells = args
        if where == NAMESPACE:
            globals_ = receiver.namespace
        elif isinstance(where, types.ModuleType):
            globals_ = vars(where)
        else:
            globals_ = {key: receiver.decode(value) for key, value in where}
            globals_["__builtins__"] = __builtins__
        return types.FunctionType(code, globals_, name, None, tuple(map(receiver.decode, cells)) or None)

    def _fields(self, fn: types.FunctionType) -> tuple[Any, ...]:
        extra = (getattr(fn, "__type_params__", ()),) if sys.version_info >= (3, 12) else ()
        annotations = {} if sys.version_info >= (3, 14) else fn.__annotations__
        return (fn.__qualname__, fn.__module__, fn.__doc__, fn.__defaults__, fn.__kwdefaults__ or None,
                annotations or None, fn.__code__, fn.__name__, *fn.__dict__, *fn.__dict__.values(), *extra)  # fmt: skip

    def look(self, node: Node, walk: Sender) -> Any:
        fn: types.FunctionType = node.obj
        fields = self._fields(fn)
        if node.seen is not None and same_items(fields, node.seen):
            return None
        node.seen = fields
        head, plain, rest = fields[:6], fields[6:8], fields[8:]
        count = len(fn.__dict__)
        encoded = (*map(walk.encode, head), *plain)
        attributes = list(zip(rest[:count], map(walk.encode, rest[count : 2 * count]), strict=True))
        return encoded, attributes, tuple(map(walk.encode, rest[2 * count :]))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        fn: types.FunctionType = node.obj
        (*fields, code, fn.__name__), attributes, type_params = state
        if fn.__code__ is not code:
            fn.__code__ = code
        decoded = tuple(map(receiver.decode, fields))
        fn.__qualname__, fn.__module__, fn.__doc__, fn.__defaults__, fn.__kwdefaults__ = decoded[:5]
        if decoded[5] is not None:
            fn.__annotations__ = decoded[5]
        fn.__dict__.clear()
        fn.__dict__.update((name, receiver.decode(value)) for name, value in attributes)
        if type_params and type_params[0]:
            fn.__type_params__ = receiver.decode(type_params[0])
        node.seen = None


class ClosureVariableKind(Kind):
    """One closure variable."""

    name = "cell"
    lasting = True

    def make(self, args: Any, receiver: Receiver) -> Any:
        return types.CellType()

    def look(self, node: Node, walk: Sender) -> Any:
        try:
            now: tuple[Any, ...] = (node.obj.cell_contents,)
        except ValueError:
            now = ()
        if node.seen is not None and same_items(now, node.seen):
            return None
        node.seen = now
        return tuple(map(walk.encode, now))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        if state:
            node.obj.cell_contents = receiver.decode(state[0])
        else:
            del node.obj.cell_contents
        node.seen = None


class PartialKind(Kind):
    """`functools.partial`: its arguments may be objects that both sides know."""

    name = "partial"

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(node.obj.func)

    def make(self, args: Any, receiver: Receiver) -> Any:
        return functools.partial(receiver.decode(args))

    def look(self, node: Node, walk: Sender) -> Any:
        made = node.obj
        seen = (*made.args, None, *made.keywords, *made.keywords.values(), None, *vars(made), *vars(made).values())
        if node.seen is not None and same_items(seen, node.seen):
            return None
        node.seen = seen
        fields = [[(key, walk.encode(value)) for key, value in table.items()] for table in (made.keywords, vars(made))]
        return tuple(map(walk.encode, made.args)), *fields

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        args, *fields = state
        keywords, attributes = ({key: receiver.decode(value) for key, value in field} for field in fields)
        node.obj.__setstate__((node.obj.func, tuple(map(receiver.decode, args)), keywords, attributes))
        node.seen = None


class NewTypeKind(Kind):
    """`typing.NewType`, which pickles by name as well."""

    name = "NewType"
    whole = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        return node.obj.__name__, node.obj.__module__, walk.encode(node.obj.__supertype__)

    def make(self, args: Any, receiver: Receiver) -> Any:
        new: Any = typing.NewType
        made = new(args[0], receiver.decode(args[2]))
        made.__module__ = args[1]
        return made


class RunningFrameKind(Kind):
    """Generators, coroutines, frames: they hold a running frame."""

    name = "running frame"

    def make_args(self, node: Node, walk: Sender) -> Any:
        raise CannotTravel(f"a {type(node.obj).__name__} holds a running frame")


def _cached_property(function: Any, name: str) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _alias_parts(obj: Any) -> tuple[Any, ...]:
    if isinstance(obj, types.UnionType):
        return typing.Union, obj.__args__, "|"
    make, args = obj.__reduce__()
    return make, tuple(args)


def _alias(make: Any, args: tuple[Any, ...], *union: str) -> Any:
    return functools.reduce(operator.or_, args) if union else make(*args)


def _shown_by_proxy(obj: Any) -> tuple[Any]:
    """The dict behind a read-only view; of what a class holds, the class."""
    mapping = gc.get_referents(obj)[0]
    if "__module__" in mapping and "__doc__" in mapping:
        for holder in gc.get_referrers(mapping):
            if isinstance(holder, type):
                return (holder,)
    return (mapping,)


KINDS: dict[type, Kind] = {
    types.FunctionType: FunctionKind(), types.CellType: ClosureVariableKind(),
    types.MethodType: CompoundKind("method", lambda obj: (obj.__func__, obj.__self__), types.MethodType),
    staticmethod: CompoundKind("staticmethod", lambda obj: (obj.__func__,), staticmethod),
    classmethod: CompoundKind("classmethod", lambda obj: (obj.__func__,), classmethod),
    property: CompoundKind("property", lambda obj: (obj.fget, obj.fset, obj.fdel, obj.__doc__), property),
    # has a lock on Python 3.10 and 3.11, which is why it cannot be taken as an instance
    functools.cached_property: CompoundKind("cached_property", lambda obj: (obj.func, obj.attrname), _cached_property),
    types.MappingProxyType: CompoundKind(
        "mappingproxy",
        _shown_by_proxy,
        lambda held: vars(held) if isinstance(held, type) else types.MappingProxyType(held),
    ),
    python.LruCache: LruCacheKind(), functools.partial: PartialKind(), typing.NewType: NewTypeKind(),
    **dict.fromkeys(
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.TracebackType),
        RunningFrameKind(),
    ),
}  # fmt: skip
BUILTIN_METHOD = CompoundKind("builtin method", lambda obj: (obj.__self__, obj.__name__), getattr, asks=True)
"""`list.append` of one particular list, `rng.random` of one generator."""
REPLACED = CompoundKind("replaced", lambda obj: (imported_as(obj),), at)
"""A function of torch's that is replaced, or its wrapper, which was imported by name: on the other side it is what
stands there, with that side's listeners or without."""
ALIAS = CompoundKind("generic alias", _alias_parts, _alias)
"""`Generic[T]`, `list[Net]`, `Net | None`: nobody can change one, and what it is made of may be the notebook's."""
# mypy has Generic[T] for base classes alone
ALIASES: tuple[type, ...] = (types.GenericAlias, types.UnionType, type(typing.Generic[typing.TypeVar("_T")]))  # type: ignore[index]
