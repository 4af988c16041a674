"""`nbtrain.run(function, …)`: calls a function on all ranks, as a cell below `%%distributed` would."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from nbtrain.annexes.frameworks.functions.arguments import line_of
from nbtrain.annexes.frameworks.functions.run_cell import (
    errors_in_short,
    notebook,
    refuse_on_a_rank,
    run_cell,
    script_here,
)
from nbtrain.annexes.frameworks.functions.used_objects import used_objects
from nbtrain.base.errors import UsageError
from nbtrain.base.events import RESULT
from nbtrain.exchange.kinds.base import Handle

FUNCTION, ARGS, KWARGS, AROUND = (f"nbtrain_{name}" for name in ("function", "args", "kwargs", "around"))
"""names that the cell has while it runs"""
UNFINISHED = {
    "generator": "which has computed nothing yet and cannot leave the ranks: let the function return list(…) of it",
    "async_generator": "which has computed nothing yet and cannot leave the ranks: let the function return a list",
    "coroutine": "which has computed nothing yet and cannot leave the ranks: call it in a cell, below %%distributed "
    "found = await function()",
}
"""what a call may return that goes on where it was made → why that is no result"""


@errors_in_short()
def run(
    function: Callable[..., Any],
    *args: Any,
    strategy: Any = "auto",
    devices: Any = "auto",
    accelerator: Any = "auto",
    precision: Any = None,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` on all ranks, and return what rank 0's call has returned.

    What the function reads of the notebook, its arguments and what it closes over are there as in a cell below
    `%%distributed`, and what it changes in them comes home. `strategy`, `devices`, `accelerator` and `precision` as
    there: `run(train, model, strategy="fsdp --wrap Block", devices=4)`; `devices` may be a number, or a list.
    """
    return call(*line_of(strategy, devices, accelerator, precision), function, args, kwargs)


def call(
    line: str,
    named: Mapping[str, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    around: AbstractContextManager[Any] | None = None,
    what: str = "nbtrain.run",
) -> Any:
    """`around`: in which the function is called on each rank."""
    refuse_on_a_rank(what)
    if not callable(function):
        raise UsageError(f"{what} takes a function, not {type(function).__name__}: {what}(train, …)")
    if reason := _runs_nothing(function):
        raise UsageError(f"{what}: {reason}")
    shell, kwargs = notebook(), dict(kwargs or {})
    name = getattr(function, "__name__", "")
    names: dict[str, Any] = {ARGS: tuple(args), KWARGS: kwargs}
    # By its own name, so that a traceback says it; else, as a function that was made in another, by ours.
    if shell is None or not name.isidentifier() or shell.user_ns.get(name) is not function:
        names[FUNCTION], name = function, FUNCTION
    given = "*" + ARGS if args else ""
    given += (", " if given and kwargs else "") + (f"**{KWARGS}" if kwargs else "")
    text = f"{RESULT} = {name}({given})\n"
    title = f"# {what}: {getattr(function, '__qualname__', type(function).__name__)}\n"  # what a history has of it
    if around is not None:
        names[AROUND] = around
        text = f"with {AROUND}:\n    {text}"
    if shell is None:
        box: list[Any] = []
        names |= {RESULT: box, **named}
        text = text.replace(f"{RESULT} = {name}({given})", f"{RESULT}.append({name}({given}))")
        script_here().run(line, f"<{what}>", text, names, used_objects(function, args, kwargs))
        return box[0]
    try:
        run_cell(shell, line, title + text, {**names, **named})
        result = shell.user_ns.get(RESULT)
        if type(result) is Handle and result.type_name in UNFINISHED:
            raise UsageError(f"{what}: the function returned a {result.type_name}, {UNFINISHED[result.type_name]}")
        return result
    finally:
        for one in (*names, *named, RESULT):
            shell.user_ns.pop(one, None)


def _runs_nothing(function: Any) -> str:
    """Why a call would run nothing of it."""
    if inspect.iscoroutinefunction(function):
        return f"an async function returns a coroutine, {UNFINISHED['coroutine']}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"a function with yield returns a generator, {UNFINISHED['generator']}"
    return ""
