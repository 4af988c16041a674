"""What a notebook holds after its cells have run: every value below its names, and who is identical with whom.

    differences(outcome(one), outcome(other), tolerance=1e-4)     # lines; none when they are the same

An outcome is flat: a path (`trainer.optimizer.param_groups[0]['lr']`) and what stands there. An object met again is
where it was met first (`= model.0.weight`), and tensors say whose memory they share, so that aliases and cycles are
compared too. Gradients are left out: they stay where they are.
"""

from __future__ import annotations

import enum
import random
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from nbtrain.exchange.names.cell_names import own

Outcome = dict[str, Any]
kept: dict[tuple[str, ...], Outcome] = {}
"""Here while a kernel's namespace is emptied."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device,
         torch.Size, np.generic)  # fmt: skip
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)


def outcome(namespace: Mapping[str, Any]) -> Outcome:
    walk = _Walk()
    for name in sorted(own(namespace)):  # in a fixed order: the first path to an object is its name
        if name not in ("exit", "quit", "open"):
            walk.visit(name, namespace[name])
    walk.visit("torch's stream", torch.get_rng_state())
    walk.visit("random's stream", random.getstate())
    walk.visit("numpy's stream", np.random.get_state()[1:3])  # type: ignore[index]
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: Outcome = {}
        self.first: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        self.alive: list[Any] = []

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, enum.Enum):  # each run has a class of its own
            self.found[path] = f"{type(value).__qualname__} {value!r}"
            return
        if isinstance(value, PLAIN):
            self.found[path] = value
            return
        if isinstance(value, CODE):
            self.found[path] = f"{type(value).__name__} {getattr(value, '__qualname__', value.__name__)}"
            return
        if id(value) in self.first:
            self.found[path] = f"= {self.first[id(value)]}"
            return
        if type(value) is not tuple:
            self.first[id(value)] = path
        self.alive.append(value)  # what a property made must not give its id to the next
        if isinstance(value, RemovableHandle):  # its number counts all hooks that a process ever made
            self.found[path] = "a handle"
            return
        self.found[path] = f"a {type(value).__name__}"
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._numbers(path, value)
        elif isinstance(value, torch.Generator):
            self.found[f"{path} state"] = value.get_state()
        if isinstance(value, Mapping):
            self._mapping(path, value)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self.visit(f"{path}[{i}]", item)
            self.found[f"{path} length"] = len(value)
        elif isinstance(value, (set, frozenset)):
            self.found[f"{path} members"] = sorted(map(repr, value))
        for name, item in getattr(value, "__dict__", {}).items():
            self.visit(f"{path}.{name}", item)
        for name in getattr(type(value), "__slots__", ()):
            if hasattr(value, name) and not isinstance(value, (tuple, torch.Tensor)):
                self.visit(f"{path}.{name}", getattr(value, name))

    def _numbers(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self.found[f"{path} value"] = value.copy()
            where = value.ctypes.data
        else:
            self.found[f"{path} value"] = value.detach().clone()
            grown = value.requires_grad and value.is_leaf  # the graph of a loss stays where it was recorded
            self.found[f"{path} kind"] = (grown, value.stride(), value.storage_offset())
            where = value.untyped_storage().data_ptr()
        if where and (value.numel() if isinstance(value, torch.Tensor) else value.size):
            self.found[f"{path} memory"] = self.memory.setdefault(where, path)

    def _mapping(self, path: str, value: Mapping[Any, Any]) -> None:
        keys = []
        for number, (key, item) in enumerate(value.items()):
            named = repr(key) if isinstance(key, (*PLAIN, tuple)) else self.first.get(id(key), f"key {number}")
            keys.append(named)
            self.visit(f"{path}[{named}]", item)
        self.found[f"{path} keys"] = keys


def differences(
    one: Outcome, other: Outcome, tolerance: float = 0.0, *, steep: str = "", own: Iterable[str] = ()
) -> list[str]:
    """What is in one and not, or otherwise, in the other.

    `steep`: in a path, it makes the tolerance a hundred times as large. `own`: beginnings of paths below which numbers
    may differ, but not types, lengths and shapes.
    """
    own = tuple(own)
    found = [f"{path}: missing" for path in one if path not in other]
    found += [f"{path}: more than there should be" for path in other if path not in one]
    for path in one.keys() & other.keys():
        left, right = one[path], other[path]
        if path.startswith(own):
            same = _sort(left) == _sort(right)
        else:
            same = _same(left, right, tolerance * (100 if steep and steep in path else 1))
        if not same:
            found.append(f"{path}: {_text(left, right)}")
    return sorted(found)


def _sort(value: Any) -> Any:
    """What is left of a value without its numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.dtype, tuple(value.shape)
    return type(value) if isinstance(value, float) else value


def _same(left: Any, right: Any, tolerance: float) -> bool:
    if _sort(left) != _sort(right):
        return False
    if isinstance(left, np.ndarray):
        if left.dtype.kind not in "biufc":
            return np.array_equal(left, right)
        left, right = torch.from_numpy(left), torch.from_numpy(right)
    if isinstance(left, float):
        left, right = torch.tensor([left, right], dtype=torch.float64).unbind()
    if not isinstance(left, torch.Tensor):
        return True
    return torch.equal(left, right) or _off(left, right) <= tolerance * (_size(left) + 1e-2)


def _off(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left.double() - right.double()).abs().max().item()


def _size(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item()


def _text(left: Any, right: Any) -> str:
    if isinstance(left, torch.Tensor) and _sort(left) == _sort(right):
        return f"off by {_off(left, right):.3g} where the largest is {_size(left):.3g}"
    return f"{left!r:.80} is {right!r:.80}"
