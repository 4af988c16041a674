"""torch.compile's compiler, without importing it: that takes two seconds. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from nbtrain.compat.internals import Internals

its = Internals("torch")

MODULE = "torch._dynamo"
"""Imported when an optimizer is made, which takes as long as torch: see `rank_imports.py`."""
TRACERS = "torch.jit._trace", "torch.export", "torch.fx._symbolic_trace"
"""modules through which errors of what traces a model come"""
_disable = its.name("torch._disable_dynamo")

_OUTSIDE = "_torchdynamo_disable"
_FRAMES = "torch._C._dynamo.eval_frame"
_compile_by = its.name(f"{_FRAMES}.set_code_exec_strategy")
_Strategy, _Action = its.name(f"{_FRAMES}._FrameExecStrategy"), its.name(f"{_FRAMES}._FrameAction")
_around_step = its.name("torch.optim.Optimizer.profile_hook_step")

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Keep a function out of compiled graphs. `torch.compiler.disable` does so, too, but imports the compiler."""
    disabled: F = _disable(function)
    return disabled


def mark_outside_graphs(function: Any) -> None:
    """Keep a method out of its caller's compiled graph, by a mark that the compiler looks for."""
    setattr(function, _OUTSIDE, True)


@contextmanager
def steps_outside_graphs(optimizers: Iterable[Any]) -> Iterator[None]:
    """While this lasts, steps are not compiled, however they are called. All of them have one code of torch's around
    them, which is left alone where it is called, and those of these optimizers no graph takes in."""
    code = next(const for const in _around_step.__code__.co_consts if isinstance(const, CodeType))
    steps = {
        step for step in (type(optimizer).step for optimizer in optimizers) if getattr(step, "__code__", None) is code
    }
    _compile_by(code, _Strategy(_Action.SKIP, _Action.SKIP))
    for step in steps:
        mark_outside_graphs(step)
    try:
        yield
    finally:
        _compile_by(code, _Strategy(_Action.DEFAULT, _Action.DEFAULT))
        for step in steps:
            vars(step).pop(_OUTSIDE, None)


def is_loaded() -> bool:
    return MODULE in sys.modules


def has_compiled() -> bool:
    """Whether anything was compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and any(dynamo.counters.values())  # with fullgraph=True it counts no frames
