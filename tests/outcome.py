"""What a notebook holds after its cells have run: every value below its names, and who is identical with whom.

    outcomes["plain"] = outcome(globals())
    differences(outcomes["plain"], outcomes["ddp"], tolerance=1e-4)     # lines, empty when they are the same

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

from nbtrain.exchange.names import private

Outcome = dict[str, Any]
outcomes: dict[str, Outcome] = {}
"""Kept here while a kernel's namespace is emptied."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice, torch.dtype, torch.device,
         torch.Size, np.generic)  # fmt: skip
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)


def outcome(namespace: Mapping[str, Any]) -> Outcome:
    walk = _Walk()
    for name in sorted(namespace):  # in a fixed order: the first path to an object is its name
        if not private(name) and name not in ("exit", "quit", "open"):
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
            self.found[f"{path} kind"] = (value.requires_grad, value.stride(), value.storage_offset())
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


def differences(one: Outcome, other: Outcome, tolerance: float = 0.0, except_for: Iterable[str] = ()) -> list[str]:
    """`except_for`: beginnings of paths below which values, but not kinds and lengths, may differ."""
    excepted = tuple(except_for)
    found = [f"{path}: missing" for path in one if path not in other]
    found += [f"{path}: more than there should be" for path in other if path not in one]
    for path, left in one.items():
        if path not in other:
            continue
        right = other[path]
        if path.startswith(excepted) if excepted else False:
            if type(left) is not type(right) or getattr(left, "shape", 0) != getattr(right, "shape", 0):
                found.append(f"{path}: {left!r:.60} is {right!r:.60}")
        elif distance := _distance(left, right, tolerance):
            found.append(f"{path}: {distance}")
    return found


def _distance(left: Any, right: Any, tolerance: float) -> str:
    if type(left) is not type(right):
        return f"{left!r:.60} is {right!r:.60}"
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype:
            return f"{left.dtype} is {right.dtype}"
        if left.dtype.kind not in "biufc":
            return "" if np.array_equal(left, right) else f"{left!r:.60} is {right!r:.60}"
        left, right = torch.from_numpy(left), torch.from_numpy(right)
    if isinstance(left, float):
        left, right = torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
    if not isinstance(left, torch.Tensor):
        return "" if left == right else f"{left!r:.60} is {right!r:.60}"
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {tuple(left.shape)} is {right.dtype} {tuple(right.shape)}"
    if torch.equal(left, right) or not left.numel():
        return ""
    off = (left.double() - right.double()).abs().max().item()
    size = left.double().abs().max().item()
    if off <= tolerance * (size + 1e-2):
        return ""
    return f"off by {off:.3g} where the largest is {size:.3g}"
