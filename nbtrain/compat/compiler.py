"""torch.compile's compiler, without importing it: that takes two seconds. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from nbtrain.compat.internals import Internals

its = Internals("torch")
check = its.check

MODULE = "torch._dynamo"
"""Every optimizer imports it when it is made; a rank's nursery does that beforehand."""
_disable = its.name("torch._disable_dynamo")

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """What it does is no computation, and is not to be looked into. `torch.compiler.disable` would import the compiler
    here and now."""
    found: F = _disable(function)
    return found


def mark_outside_graphs(function: Any) -> None:
    """A method that a class takes into its body: it becomes no part of its caller's graph. The compiler looks for the
    mark."""
    function._torchdynamo_disable = True


def is_loaded() -> bool:
    return MODULE in sys.modules


def has_compiled() -> bool:
    """Something was compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and any(dynamo.counters.values())  # with fullgraph=True it counts no frames
