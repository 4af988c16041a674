"""Finds the models, optimizers, schedulers and loaders that a call in a script may use.

In a notebook the cell's names are walked for what they hold. A script has no cell: what a call can reach is its
function, with the globals that its code names and what it closes over, its arguments, and what is below these.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from nbtrain.exchange.kinds.base import ATOMS
from nbtrain.exchange.names.code_globals import function_names
from nbtrain.worker.setup.components import PREPARABLE


def used_objects(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """By how the call reaches them: `self.model`, `args[0]`. In the same order in every process."""
    by_name: dict[str, Any] = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque([("", function), ("args", args), ("kwargs", kwargs)])
    while todo:
        name, value = todo.popleft()
        if type(value) in ATOMS or isinstance(value, Tensor | ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, PREPARABLE):
            by_name[name] = value
        else:
            todo += _below(name, value)
    return by_name


def _below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Not of a set, whose order is another one in each process."""
    dot = f"{name}." if name else ""
    if isinstance(value, MethodType):
        yield f"{dot}self", value.__self__
        yield name, value.__func__
    elif isinstance(value, FunctionType):
        if not _of_a_library(value.__module__):
            yield from _of_function(dot, value)
    elif isinstance(value, functools.partial):
        yield from ((name, value.func), (name, value.args), (name, value.keywords))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", item) for at, item in enumerate(list(value)))
    elif isinstance(value, type):
        if not _of_a_library(value.__module__):
            yield from ((dot + key, member) for key, member in vars(value).items() if isinstance(member, FunctionType))
    else:
        yield from ((dot + key, member) for key, member in list(getattr(value, "__dict__", {}).items()))
        yield name, type(value)  # its methods call each other


def _of_function(dot: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for key in sorted(function_names(function.__code__).reads):
        if key in function.__globals__:
            yield f"{dot}{key}", function.__globals__[key]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{dot}{key}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((dot, default) for default in (function.__defaults__, function.__kwdefaults__))


def _of_a_library(module: str) -> bool:
    """Code that is installed reaches no object of the script by its own names."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or module.partition(".")[0] in sys.stdlib_module_names | {"torch", "nbtrain"}
