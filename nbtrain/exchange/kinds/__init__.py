"""How each kind of object is looked at, made on the other side, and edited in place.

    base.py        what a kind is; atoms, references
    containers.py  lists, dicts, sets, tuples
    long_constants.py      long strings, bytes and tuples of values
    container_subclasses.py     those with attributes of their own: ordered dicts, classes below them
    functions.py        functions of the notebook, and what wraps them
    classes.py     its classes
    hooks.py       hooks on the gradients of tensors
    objects.py     instances; whatever only its own pickle can move
    not_sendable.py     what belongs to one process; its streams and its shell
    arrays.py      NumPy arrays
    tensors.py     tensors and the memory they show
    split_tensors.py       those whose content is in pieces here
    numeric.py     which of them are dense memory
    random_generators.py      random generators
    modules_and_optimizers.py    modules, optimizers, schedulers, loaders
    module_state.py  what was changed in modules of Python

`kind_of` decides; None means that an object travels as it is, by value or by name.
"""

from __future__ import annotations

import collections
import enum
import types
import typing
import weakref
from collections.abc import Container
from typing import Any

from nbtrain.exchange.kinds import classes, containers, module_state, numeric, objects
from nbtrain.exchange.kinds import container_subclasses as derived
from nbtrain.exchange.kinds import functions as code
from nbtrain.exchange.kinds import long_constants as frozen
from nbtrain.exchange.kinds import modules_and_optimizers as learning
from nbtrain.exchange.kinds import not_sendable as refused
from nbtrain.exchange.kinds import random_generators as random
from nbtrain.exchange.kinds import split_tensors as apart
from nbtrain.exchange.kinds.base import ATOMS, NOTHING, Handle, Kind, Make, Packed, Put, Ref
from nbtrain.intercept import path_of

_BY_TYPE: dict[type, Kind] = {
    **containers.KINDS,
    collections.OrderedDict: derived.ORDERED,
    **code.KINDS,
    types.SimpleNamespace: objects.INSTANCE,
    weakref.ReferenceType: objects.WEAK,
    apart.MemoryPlace: apart.PLACE,
    Handle: objects.KEPT,
    module_state.ModuleState: module_state.STATE,
}
_BY_NAME: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *_BY_TYPE.values(), *derived.KINDS.values(), containers.NAMED, containers.NOTED, frozen.FROZEN, classes.CLASS,
        code.BUILTIN_METHOD, code.REPLACED,
        code.ALIAS, objects.INSTANCE, objects.STATEFUL, objects.OPAQUE, objects.KEPT, objects.SENTINEL, objects.MEMBER,
        numeric.ARRAY, numeric.MEMMAP, numeric.OBJECTS, numeric.STORAGE, numeric.TENSOR, apart.APART,
        learning.MODULE, learning.OPTIMIZER, learning.SCHEDULER, learning.LOADER, learning.COMPILED,
        learning.HOOK_HANDLE,
        random.TORCH, random.BITS, random.NUMPY,
        refused.REFUSED, refused.BY_NAME, refused.LOG_HANDLER,
    )
}  # fmt: skip


def kind_named(name: str) -> Kind:
    return _BY_NAME[name]


def kind_of(obj: Any, namespace: dict[str, Any], parted: Container[int] = ()) -> Kind | None:
    """How this object travels; None: as it is. `parted`: ids of the tensors that are here in pieces."""
    if parted and id(obj) in parted:
        return apart.APART
    try:
        return _kind_of(obj, namespace)
    except Exception:  # a property or a metaclass of the user's: its own pickle says what is wrong with it
        return objects.OPAQUE


def _kind_of(obj: Any, namespace: dict[str, Any]) -> Kind | None:
    cls = type(obj)
    if cls is types.FunctionType:
        if path_of(obj):
            return code.REPLACED
        ours = obj.__globals__ is namespace
        return code.KINDS[cls] if ours or not code.importable(obj) else None
    kind = _BY_TYPE.get(cls)
    if kind is not None:
        return kind
    kind = refused.kind_of(obj)
    if kind is not None:
        return kind
    if isinstance(obj, code.ALIASES):  # before classes: `list[int]` calls itself one
        return code.ALIAS
    if isinstance(obj, type):
        return None if code.importable(obj) or not obj.__flags__ & (1 << 9) else classes.CLASS
    if cls in (types.BuiltinFunctionType, types.MethodWrapperType):
        bound = getattr(obj, "__self__", None)
        return None if bound is None or isinstance(bound, (types.ModuleType, type)) else code.BUILTIN_METHOD
    kind = numeric.kind_of(obj) or learning.kind_of(obj) or random.kind_of(obj)
    if kind is not None:
        return kind
    if isinstance(obj, tuple):
        return containers.NOTED if getattr(obj, "__dict__", None) else containers.NAMED
    if isinstance(obj, enum.Enum):
        return None if code.importable(cls) else objects.MEMBER
    if isinstance(obj, typing.TypeVar):
        return objects.OPAQUE
    kind = derived.kind_of(obj) or objects.plain_instance(obj)
    if kind is objects.INSTANCE and objects.sentinel(obj):
        return objects.SENTINEL
    return kind or objects.OPAQUE


__all__ = ["ATOMS", "NOTHING", "Handle", "Kind", "Make", "Packed", "Put", "Ref", "kind_named", "kind_of"]
