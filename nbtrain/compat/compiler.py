"""torch.compile's compiler, without importing it: that takes two seconds. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from nbtrain.compat.internals import Internals

its = Internals("torch")

MODULE = "torch._dynamo"
"""Imported when an optimizer is made, which takes as long as torch: see `rank_imports.py`."""
_disable = its.name("torch._disable_dynamo")

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Keep a function out of compiled graphs. `torch.compiler.disable` does so, too, but imports the compiler."""
    found: F = _disable(function)
    return found


def mark_outside_graphs(function: Any) -> None:
    """Keep a method out of its caller's compiled graph, by a mark that the compiler looks for."""
    function._torchdynamo_disable = True


def is_loaded() -> bool:
    return MODULE in sys.modules


def has_compiled() -> bool:
    """Whether anything was compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and any(dynamo.counters.values())  # with fullgraph=True it counts no frames
