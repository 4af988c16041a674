"""Expressions: new objects, objects that there are already, and what shows the same memory or holds the same object."""

# ruff: noqa: E501 — a template is one line
from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from nbtrain.exchange.names.cell_names import own

T = TypeVar("T")
DEEP = 3
"""so many steps from a name"""

ATOMS = ("0", "1", "-7", "2.5", "'k'", "'word'", "None", "True", "b'xy'", "(1, 2)", "10**20", "1j", "float('inf')")
KEYS = ("'k'", "'n'", "1", "(1, 'a')", "None")
FRESH = (
    "[]", "{}", "set()", "[[1], [2]]", "{'k': [1], 'n': {'deep': []}}", "collections.deque([1, 2], maxlen=4)",
    "{1, 'a', (2, 3)}", "collections.OrderedDict(x=1, y=[2])", "collections.Counter('abca')", "bytearray(b'abc')",
    "collections.defaultdict(list, k=[1])", "frozenset({1, 2})", "slice(1, 4)", "types.SimpleNamespace(x=[1])",
    "np.arange(6.)", "np.arange(6).reshape(2, 3)", "np.zeros((2, 3), order='F')", "np.array(3.)", "np.float32(1.5)",
    "np.array([(1, 2.)], dtype=[('i', 'i4'), ('f', 'f8')])", "np.array([1, 'a', None], dtype=object)",
    "np.zeros(0)", "np.array(['ab', 'c'])", "np.arange(4) > 1", "np.dtype('i4')", "np.arange(12.).reshape(3, 4)[:, 1:3]",
    "torch.arange(6.)", "torch.ones(2, 3)", "torch.zeros(2, 2, dtype=torch.int64)", "torch.tensor(2.)",
    "torch.nn.Parameter(torch.ones(2, 2))", "torch.ones(3).expand(2, 3)", "torch.ones(2, 3).T", "torch.zeros(0)",
    "torch.arange(4.).to(torch.bfloat16)", "torch.Size([1, 2])", "torch.nn.Linear(2, 2)", "torch.nn.BatchNorm1d(2)",
    "torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())", "torch.arange(8.)[2:6]",
    "weakref.WeakKeyDictionary()", "ValueError('no', [1])", "len", "dict", "math", "functools.reduce",
    "torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))])", "np.arange(3.).view()", "torch.ones(2).requires_grad_()",
    "operator.itemgetter(1)", "re.compile('a+')", "np.ma.array([1, 2], mask=[0, 1])", "torch.device('cpu')",
    "collections.ChainMap({'k': 1}, {})", "datetime.date(2020, 1, 1)", "fractions.Fraction(1, 3)",
    "types.MappingProxyType({'k': 1})", "array.array('i', [1, 2])", "complex(1, 2)", "range(3)",
)  # fmt: skip


class Scene:
    """What a statement may speak of: the objects of one namespace, as paths, and a source of choices."""

    def __init__(self, namespace: dict[str, Any], choose: Callable[[int], int]) -> None:
        self.namespace = namespace
        self.choose = choose
        """a number below the one given"""

    def pick(self, options: Sequence[T]) -> T:
        return options[self.choose(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.choose(one_in) == one_in - 1  # the simplest choice is no

    def places(self, *types_: type, where: Callable[[Any], bool] = lambda obj: True) -> list[str]:
        """Paths to objects of these types."""
        found = []
        for path, obj in self._everything():
            if (not types_ or isinstance(obj, types_)) and where(obj):
                found.append(path)
        return found

    def _everything(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        ahead = [
            (name, self.namespace[name])
            for name in own(self.namespace)
            if not isinstance(self.namespace[name], types.ModuleType)
        ]
        for _ in range(DEEP):
            found += ahead
            ahead = [step for path, obj in ahead for step in _inside(path, obj)][:60]
        return found


def _inside(path: str, obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, (list, tuple, collections.deque)):
        return [(f"{path}[{index}]", value) for index, value in enumerate(list(obj)[:3])]
    if isinstance(obj, dict):
        return [(f"{path}[{key!r}]", v) for key, v in obj.items() if isinstance(key, (str, int, type(None)))][:4]
    if isinstance(obj, functools.partial):
        return [(f"{path}.args[{index}]", value) for index, value in enumerate(obj.args)]
    if isinstance(obj, torch.nn.Module):
        held = [*obj.named_parameters(recurse=False), *obj.named_buffers(recurse=False)]
        layers = [(f"_modules[{name!r}]", layer) for name, layer in obj.named_children()]
        own = [(name, value) for name, value in vars(obj).items() if name in ("x", "y", "left", "right")]
        return [(f"{path}.{name}", value) for name, value in [*held, *layers, *own] if not name.isdigit()]
    if isinstance(obj, enum.Enum):
        return []
    if isinstance(obj, np.ndarray):
        return [(f"{path}[{i}]", v) for i, v in enumerate(obj[:2])] if obj.dtype == object and obj.ndim == 1 else []
    if isinstance(obj, type):
        return [(f"{path}.{n}", v) for n, v in vars(obj).items() if n in ("shared", "ONE", "table")]
    if type(obj).__module__ in ("__main__", "types"):
        names = [*getattr(obj, "__dict__", {}), *(n for n in ("left", "right") if n in dir(type(obj)))]
        return [(f"{path}.{n}", getattr(obj, n)) for n in dict.fromkeys(names) if hasattr(obj, n) and n[0] != "_"]
    if isinstance(obj, types.FunctionType):
        return [(f"{path}.{name}", value) for name, value in vars(obj).items() if name[0] != "_"]
    return []


def value(scene: Scene, depth: int = 2) -> str:
    """Any expression."""
    kind = scene.choose(10)
    if kind < 2 or depth == 0:
        return scene.pick(ATOMS)
    if kind < 5:
        return there(scene)
    if kind == 5:
        return scene.pick(FRESH)
    if kind == 6:
        return shown(scene) or there(scene)
    if kind == 7:
        return made(scene, depth) or there(scene)
    inner = [value(scene, depth - 1) for _ in range(1 + scene.choose(3))]
    form = scene.choose(6)
    if form == 0:
        return f"[{', '.join(inner)}]"
    if form == 1:
        return "{" + ", ".join(f"{key}: {v}" for key, v in zip(KEYS, inner, strict=False)) + "}"
    if form == 2:
        return f"({', '.join(inner)},)"
    if form == 3:
        return f"functools.partial(print, {', '.join(inner)}, end={inner[0]})"
    if form == 4:
        return f"types.SimpleNamespace(x={inner[0]}, y={inner[-1]})"
    return f"(lambda x, d={inner[0]}: (x, d))"


def there(scene: Scene) -> str:
    """An object that there is."""
    found = scene.places()
    return scene.pick(found) if found else "[]"


def shown(scene: Scene) -> str | None:
    """Something that shows or leads to what another object holds."""
    # Not here: views of masked arrays and records. They arrive as copies.
    arrays = scene.places(np.ndarray, where=lambda a: type(a) is np.ndarray and a.ndim > 0 and a.size > 0)
    tensors = scene.places(torch.Tensor, where=lambda t: t.ndim > 0 and t.numel() > 0)
    options = [
        *(f"{a}{view}" for a in arrays[:3] for view in ("[1:]", ".T", ".reshape(-1)", "[::-1]", "[..., :1]", "[0]")),
        *(
            f"{t}.detach(){view}"
            for t in tensors[:3]
            for view in ("[1:]", ".T", ".flatten()", "[0]", "", ".data", ".numpy()", ".unsqueeze(0)")
        ),
        *(f"torch.from_numpy({a})" for a in scene.places(np.ndarray, where=_for_torch)[:2]),
        *(f"{x}.append" for x in scene.places(list, collections.deque)[:2]),
        *(f"weakref.ref({x})" for x in scene.places(where=_weakly)[:3]),
        *(f"{x}.get" for x in scene.places(dict)[:2]),
        *(f"{x}.bump" for x in scene.places(where=lambda o: hasattr(o, "bump"))[:3]),
        *(f"{x}()" for x in scene.places(weakref.ref, where=lambda r: r() is not None)[:2]),
        *(f"torch.nn.Parameter({t}.detach())" for t in scene.places(torch.Tensor, where=_floats)[:2]),
        *(f"dict({x})" for x in scene.places(dict)[:2]),
        *(f"types.MappingProxyType({x})" for x in scene.places(dict)[:1]),
        *(f"copy.copy({x})" for x in scene.places(list, dict, types.SimpleNamespace)[:2]),
        *(f"copy.deepcopy({x})" for x in scene.places(list, dict, types.SimpleNamespace, torch.nn.Module)[:2]),
    ]
    return scene.pick(options) if options else None


def made(scene: Scene, depth: int) -> str | None:
    """What a class or function of the notebook makes."""
    classes = scene.places(type, where=lambda c: c.__module__ == "__main__")
    functions = scene.places(types.FunctionType, where=lambda f: f.__module__ == "__main__")
    options = []
    if classes:
        name = scene.pick(classes)
        cls = eval(name, scene.namespace)
        if issubclass(cls, enum.Enum):
            options += [f"{name}.{member}" for member in cls.__members__]
        else:
            options += [f"{name}()", f"{name}({value(scene, depth - 1)}, {value(scene, depth - 1)})"]
    if functions:
        options += [f"{scene.pick(functions)}({value(scene, depth - 1)})", f"{scene.pick(functions)}()"]
    return scene.pick(options) if options else None


def _weakly(obj: Any) -> bool:
    own = type(obj).__module__ == "__main__" and getattr(type(obj), "__weakrefoffset__", 0)
    return bool(own) or isinstance(obj, (set, types.FunctionType, torch.nn.Module, np.ndarray))


def _for_torch(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "fib" and array.flags.writeable and all(s > 0 for s in array.strides)


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()
