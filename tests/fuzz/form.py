"""A namespace as plain data, equal for two namespaces exactly when a program could not tell them apart.

Objects with an identity get a number when they are first met, in the order of names; wherever they are met again
there is only that number. Addresses, orders of sets and what only garbage collection decides are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import re
import sys
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch

from nbtrain.exchange.names.cell_names import own

ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented), re.Pattern,
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, torch.dtype, torch.device, np.dtype,
)  # fmt: skip
BY_PYTHON = {
    "__dict__", "__weakref__", "__slotnames__", "_abc_impl", "__annotate_func__", "__annotations_cache__",
    "__firstlineno__", "__static_attributes__",
}  # fmt: skip
"""entries of a class that Python makes"""

Form = Any


def form_of(namespace: dict[str, Any]) -> dict[str, Form]:
    """Two of these are compared with ==; `difference` says where they differ."""
    walk = _Walk(namespace)
    names = {name: walk.form(namespace[name]) for name in sorted(own(namespace))}
    walk.finish()
    return {"names": names, "objects": walk.objects}


def difference(wanted: Form, found: Form, path: str = "") -> str | None:
    """The first place where two forms differ, as a person can read it."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key not in found:
                return f"{path}.{key} is missing; in one process it is {wanted[key]!r:.300}"
            if key not in wanted:
                return f"{path}.{key} is there: {found[key]!r:.300}; in one process it is not"
            if (where := difference(wanted[key], found[key], f"{path}.{key}")) is not None:
                return where
        return None
    if type(wanted) is type(found) and isinstance(wanted, (list, tuple)) and len(wanted) == len(found):
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            if (where := difference(one, other, f"{path}[{index}]")) is not None:
                return where
        return None
    return None if wanted == found else f"{path} is {found!r:.500}; in one process it is {wanted!r:.500}"


class _Walk:
    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.objects: list[dict[str, Form]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # an address that is used again would be taken for the same object
        self._spans: list[tuple[int, int, int]] = []
        self._weak: list[tuple[dict[str, Form], Any]] = []

    def form(self, obj: Any) -> Form:
        cls = type(obj)
        if cls in ATOMS or isinstance(obj, np.dtype):
            return cls.__name__, repr(obj)
        if isinstance(obj, np.generic):
            return "scalar", str(obj.dtype), obj.tobytes()
        if isinstance(obj, types.ModuleType):
            return "module", obj.__name__
        if isinstance(obj, (types.FunctionType, type)) and _importable(obj):
            return "import", obj.__module__, obj.__qualname__
        if isinstance(obj, (types.BuiltinFunctionType, types.MethodWrapperType)):
            owner = getattr(obj, "__self__", None)
            if owner is None or isinstance(owner, (types.ModuleType, type)):
                return "import", getattr(obj, "__module__", None), obj.__qualname__
            return "builtin method", self.form(owner), obj.__name__
        if isinstance(obj, (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)):
            return "import", obj.__objclass__.__qualname__, obj.__name__
        compound = _parts(obj)
        if compound is not None:
            return (compound[0], *map(self.form, compound[1]))
        if isinstance(obj, (weakref.ref, weakref.WeakKeyDictionary)):
            place: dict[str, Form] = {"weak": cls.__name__}
            if isinstance(obj, weakref.WeakKeyDictionary):
                if id(obj) in self._numbers:
                    return "object", self._numbers[id(obj)]
                number = self._new(obj)
                self.objects.append(place)
                self._weak.append((place, obj))
                return "object", number
            self._weak.append((place, obj))
            return place
        known = (constant := _constant(obj)) is not None
        if known:
            return "constant", *constant  # type: ignore[misc]
        number = self._numbers.get(id(obj), -1)
        if number < 0:
            number = self._new(obj)
            self.objects.append({})
            self.objects[number] = {"type": self.form(cls), **self._describe(obj, number)}
        return "object", number

    def finish(self) -> None:
        """What is held weakly counts where something else holds it, and memory where it overlaps."""
        todo = self._weak
        ahead = True
        while ahead:
            ahead = False
            for place, obj in list(todo):
                if isinstance(obj, weakref.WeakKeyDictionary):
                    told = place.setdefault("entries", {})
                    for key, value in list(obj.items()):
                        number = self._numbers.get(id(key))
                        if number is not None and number not in told:
                            told[number] = None
                            told[number] = self.form(value)
                            ahead = True
        for place, obj in todo:
            if isinstance(obj, weakref.ref):
                target = obj()
                place["to"] = self._numbers.get(id(target)) if target is not None else None
            else:
                place["entries"] = sorted(place["entries"].items())
        self._share()

    def _share(self) -> None:
        end, first, cluster = -1, 0, 0
        clusters: list[tuple[int, int, int]] = []
        for start, stop, number in sorted(self._spans):
            if start >= end:
                first, cluster, end = start, len(clusters), stop
            end = max(end, stop)
            clusters.append((number, cluster, start - first))
        names: dict[int, int] = {}
        for number, cluster, offset in sorted(clusters):
            self.objects[number]["memory"] = names.setdefault(cluster, len(names)), offset

    def _new(self, obj: Any) -> int:
        self._kept.append(obj)
        self._numbers[id(obj)] = len(self.objects)
        return len(self.objects)

    def _all(self, values: Any) -> list[Form]:
        return [self.form(value) for value in list(values)]

    def _pairs(self, table: Any) -> list[Form]:
        return [(self.form(key), self.form(value)) for key, value in list(table.items())]

    def _describe(self, obj: Any, number: int) -> dict[str, Form]:
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, types.CellType):
            try:
                return {"holds": self.form(obj.cell_contents)}
            except ValueError:
                return {"holds": "nothing yet"}
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, np.ndarray):
            return self._array(obj, number)
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj, number)
        if isinstance(obj, torch.optim.Optimizer):
            groups, state = obj.param_groups, obj.state
            return {"groups": self.form(groups), "state": self._pairs(state), "defaults": self.form(obj.defaults)}
        if isinstance(obj, typing.TypeVar):
            return {"name": obj.__name__, "bound": self.form(obj.__bound__)}
        told: dict[str, Form] = {}
        if isinstance(obj, (list, collections.deque)):
            told["elements"] = self._all(obj)
            told["longest"] = getattr(obj, "maxlen", None)
        elif isinstance(obj, (set, frozenset)):
            told["elements"] = self._all(sorted(obj, key=_alone))
        elif isinstance(obj, dict):
            told["entries"] = self._pairs(obj)
            told["default"] = self.form(getattr(obj, "default_factory", None))
        elif isinstance(obj, bytearray):
            told["bytes"] = bytes(obj)
        elif isinstance(obj, functools.partial):
            told["call"] = self.form(obj.func), self._all(obj.args), self._pairs(obj.keywords)
        elif isinstance(obj, BaseException):
            told["args"] = self._all(obj.args)
        attributes = getattr(obj, "__dict__", {})
        if isinstance(obj, torch.nn.Module):  # each process numbers its hooks by itself
            hooks = [name for name, table in attributes.items() if "_hooks" in name and isinstance(table, dict)]
            told["hooks"] = [(name, self._all(attributes[name].values())) for name in hooks]
            attributes = {name: value for name, value in attributes.items() if name not in hooks}
        told["attributes"] = self._pairs({k: v for k, v in attributes.items() if k != "cache_parameters"})
        told["slots"] = [
            (name, self.form(member.__get__(obj)))
            for base in type(obj).__mro__
            for name, member in sorted(vars(base).items())
            if isinstance(member, types.MemberDescriptorType) and _filled(member, obj)
        ]
        return told

    def _function(self, obj: types.FunctionType) -> dict[str, Form]:
        where: Form = "the notebook" if obj.__globals__ is self.namespace else obj.__globals__.get("__name__")
        return {
            "code": _code(obj.__code__),
            "names": (obj.__name__, obj.__qualname__, obj.__module__, obj.__doc__),
            "globals": where,
            "defaults": self.form(obj.__defaults__),
            "keywords": self._pairs(obj.__kwdefaults__ or {}),
            "annotations": self._pairs(obj.__annotations__),
            "attributes": self._pairs(vars(obj)),
            "closure": self._all(obj.__closure__ or ()),
        }

    def _class(self, obj: type) -> dict[str, Form]:
        told: dict[str, Form] = {
            "names": (obj.__name__, obj.__qualname__, obj.__module__),
            "bases": self._all(obj.__bases__),
        }
        body = {k: v for k, v in vars(obj).items() if k not in BY_PYTHON}
        if issubclass(obj, enum.Enum):
            told["members"] = [
                (
                    n,
                    self.form(getattr(m, "_value_", None)),
                    getattr(m, "_name_", None),
                    [(k, self.form(v)) for k, v in vars(m).items() if k[0] != "_"],
                )
                for n, m in obj.__members__.items()
            ]
            body = {k: v for k, v in body.items() if not k.startswith("_") and not isinstance(v, enum.Enum)}
            body = {k: v for k, v in body.items() if type(v).__name__ not in ("property", "nonmember", "member")}
        told["body"] = {
            k: self.form(v) for k, v in sorted(body.items()) if not isinstance(v, types.MemberDescriptorType)
        }
        told["slots"] = sorted(k for k, v in body.items() if isinstance(v, types.MemberDescriptorType))
        return told

    def _array(self, obj: Any, number: int) -> dict[str, Form]:
        told: dict[str, Form] = {"dtype": str(obj.dtype), "shape": obj.shape, "writeable": obj.flags.writeable}
        if obj.dtype.hasobject:
            told["elements"] = self._all(obj.ravel().tolist()) if obj.dtype == object else repr(obj)
        else:
            told["bytes"] = obj.tobytes()
        if obj.size:
            told["strides"] = [s for s, n in zip(obj.strides, obj.shape, strict=True) if n > 1]
            self._spans.append((*np.lib.array_utils.byte_bounds(obj), number))
        return told

    def _tensor(self, obj: Any, number: int) -> dict[str, Form]:
        told: dict[str, Form] = {
            "dtype": str(obj.dtype),
            "shape": tuple(obj.shape),
            "learns": obj.requires_grad,
            "bytes": obj.detach()
            .clone(memory_format=torch.contiguous_format)
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes(),
            "attributes": self._pairs(vars(obj)),
        }
        if obj.numel():
            steps = [(s, n) for s, n in zip(obj.stride(), obj.shape, strict=True) if n > 1]
            told["strides"] = [s for s, _ in steps]
            length = 1 + sum(s * (n - 1) for s, n in steps)
            self._spans.append((obj.data_ptr(), obj.data_ptr() + length * obj.itemsize, number))
        return told


def _parts(obj: Any) -> tuple[Any, list[Any]] | None:
    """What has no identity that a program would mind."""
    if type(obj) in (tuple, slice):
        return type(obj).__name__, list(obj) if type(obj) is tuple else [obj.start, obj.stop, obj.step]
    if isinstance(obj, tuple):
        return "tuple subclass", [type(obj), *obj]
    if type(obj) is frozenset:
        return "frozenset", sorted(obj, key=_alone)
    if isinstance(obj, (types.GenericAlias, types.UnionType, typing._GenericAlias)):  # type: ignore[attr-defined]
        return "alias", [type(obj), obj.__origin__ if hasattr(obj, "__origin__") else None, obj.__args__]
    if isinstance(obj, types.MethodType):
        return "method", [obj.__func__, obj.__self__]
    if isinstance(obj, (staticmethod, classmethod)):
        return type(obj).__name__, [obj.__func__]
    if isinstance(obj, property):
        return "property", [obj.fget, obj.fset, obj.fdel, obj.__doc__]
    if isinstance(obj, functools.cached_property):
        return "cached_property", [obj.func, obj.attrname]
    if isinstance(obj, types.MappingProxyType):
        return "mappingproxy", [*gc.get_referents(obj)]
    if isinstance(obj, enum.Enum):
        return "member", [type(obj), obj.name]
    return None


def _alone(obj: Any) -> str:
    walk = _Walk({})
    return repr((walk.form(obj), walk.objects))


def _importable(obj: Any) -> bool:
    if isinstance(obj, type):
        return obj.__module__ != "__main__"
    found: Any = sys.modules.get(obj.__module__ or "")
    if found is None or obj.__module__ == "__main__":
        return False
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _constant(obj: Any) -> tuple[str, str] | None:
    """`dataclasses.MISSING` and its like."""
    module = type(obj).__module__
    if module != dataclasses.__name__ or isinstance(obj, dataclasses.Field):
        return None
    return next(((module, name) for name, value in vars(dataclasses).items() if value is obj), None)


def _filled(member: Any, obj: Any) -> bool:
    try:
        member.__get__(obj)
    except AttributeError:
        return False
    return True


def _code(code: types.CodeType) -> Form:
    consts = tuple(_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return (
        code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_argcount, code.co_kwonlyargcount, code.co_flags, consts,
    )  # fmt: skip
