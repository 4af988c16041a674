"""Finds the kind of an object. No kind imports this file: it asks its sender about other objects (`Sender.kind_of`)."""

from __future__ import annotations

import collections
import enum
import types
import typing
import weakref
from collections.abc import Mapping
from typing import Any

from nbtrain.compat.intercept import imported_as
from nbtrain.exchange.kinds import (
    arrays,
    classes,
    container_subclasses,
    containers,
    functions,
    modules_and_optimizers,
    not_sendable,
    objects,
    python_module_state,
    random_generators,
    split_tensors,
    tensors,
)
from nbtrain.exchange.kinds.base import Handle, Kind

_BY_TYPE: dict[type, Kind] = {
    **containers.KINDS,
    collections.OrderedDict: container_subclasses.ORDERED,
    **functions.KINDS,
    types.SimpleNamespace: objects.INSTANCE,
    weakref.ReferenceType: objects.WEAK_REFERENCE,
    tensors.MemoryPlace: split_tensors.PLACE,
    Handle: objects.HANDLE,
    python_module_state.ModuleState: python_module_state.STATE,
}
_BY_NAME: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *_BY_TYPE.values(), *container_subclasses.KINDS.values(), containers.TUPLE_SUBCLASS,
        containers.TUPLE_WITH_ATTRIBUTES, containers.LONG_CONSTANT, classes.CLASS, functions.BUILTIN_METHOD,
        functions.REPLACED, functions.ALIAS,
        objects.INSTANCE, objects.STATEFUL, objects.OPAQUE, objects.HANDLE, objects.SENTINEL, objects.ENUM_MEMBER,
        arrays.ARRAY, arrays.MEMMAP, arrays.OBJECTS, tensors.STORAGE, tensors.TENSOR,
        split_tensors.APART, split_tensors.ALIAS,
        modules_and_optimizers.MODULE, modules_and_optimizers.OPTIMIZER, modules_and_optimizers.SCHEDULER,
        modules_and_optimizers.LOADER, modules_and_optimizers.COMPILED, modules_and_optimizers.HOOK_HANDLE,
        random_generators.TORCH, random_generators.BITS, random_generators.NUMPY, not_sendable.REFUSED,
        not_sendable.BY_NAME, not_sendable.LOG_HANDLER,
    )
}  # fmt: skip


def kind_named(name: str) -> Kind:
    return _BY_NAME[name]


def kind_of(obj: Any, namespace: dict[str, Any], parted: Mapping[int, Any] | None = None) -> Kind | None:
    """How this object travels; None: as it is. `parted`: by id, the tensors that are here in pieces, or show some."""
    if parted and (apart := parted.get(id(obj))) is not None:
        kind: Kind = apart.kind
        return kind
    try:
        return _kind_of(obj, namespace)
    except Exception:  # a property or a metaclass of the user's: its own pickle says what is wrong with it
        return objects.OPAQUE


def _kind_of(obj: Any, namespace: dict[str, Any]) -> Kind | None:
    cls = type(obj)
    if cls in (types.FunctionType, types.BuiltinFunctionType) and imported_as(obj):
        return functions.REPLACED
    if cls is types.FunctionType:
        ours = obj.__globals__ is namespace
        return functions.KINDS[cls] if ours or not functions.importable(obj) else None
    kind = _BY_TYPE.get(cls)
    if kind is not None:
        return kind
    kind = not_sendable.kind_of(obj)
    if kind is not None:
        return kind
    if isinstance(obj, functions.ALIASES):  # before classes: `list[int]` calls itself one
        return functions.ALIAS
    if isinstance(obj, type):
        return None if functions.importable(obj) or not obj.__flags__ & (1 << 9) else classes.CLASS
    if cls in (types.BuiltinFunctionType, types.MethodWrapperType):
        bound = getattr(obj, "__self__", None)
        return None if bound is None or isinstance(bound, (types.ModuleType, type)) else functions.BUILTIN_METHOD
    kind = tensors.kind_of(obj) or arrays.kind_of(obj)
    kind = kind or modules_and_optimizers.kind_of(obj) or random_generators.kind_of(obj)
    if kind is not None:
        return kind
    if isinstance(obj, tuple):
        return containers.TUPLE_WITH_ATTRIBUTES if getattr(obj, "__dict__", None) else containers.TUPLE_SUBCLASS
    if isinstance(obj, enum.Enum):
        return None if functions.importable(cls) else objects.ENUM_MEMBER
    if isinstance(obj, typing.TypeVar):
        return objects.OPAQUE
    kind = container_subclasses.kind_of(obj) or objects.plain_instance(obj)
    if kind is objects.INSTANCE and objects.sentinel(obj):
        return objects.SENTINEL
    return kind or objects.OPAQUE
