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
    outlives,
    refuse_on_a_rank,
    run_cell,
    script_here,
    shell_of_script,
)
from nbtrain.annexes.frameworks.functions.used_objects import used_objects
from nbtrain.base.errors import UsageError
from nbtrain.base.events import RESULT
from nbtrain.exchange.kinds.base import ATOMS, Handle

FUNCTION, ARGS, KWARGS, AROUND = (f"nbtrain_{name}" for name in ("function", "args", "kwargs", "around"))
"""names that the cell has while it runs"""
DETACHES = "nbtrain.run(train, model, detach=True) hands a function over"
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
    detach: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` on all ranks, and return what rank 0's call has returned.

    What the function reads of the notebook, its arguments and what it closes over are there as in a cell below
    `%%distributed`, and what it changes in them comes home. `strategy`, `devices`, `accelerator` and `precision` as
    there: `run(train, model, strategy="fsdp --wrap Block", devices=4)`; `devices` may be a number, or a list.
    `detach=True`: as `--detach`; `until="11h45m"`: as `--until`, which is that with an end, unless the function has an
    argument of that name. Returned is the run that goes on, and what the notebook has a name for comes home.
    """
    line, named = line_of(strategy, devices, accelerator, precision)
    if detach or ("until" in kwargs and not _has_argument(function, "until")):
        line = f"{line} {_detaching(function, kwargs)}"
    return call(line, named, function, args, kwargs)


def _detaching(function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """The options that hand it over. Taken from `kwargs`: what else is the run's, and not the function's."""
    for name in ("until", "background"):
        if name in kwargs and _has_argument(function, name):
            raise UsageError(
                f"with detach=True {name} is the run's, and the function has an argument of that name: "
                f"nbtrain.run(functools.partial(train, {name}=…), …, detach=True)"
            )
    if kwargs.pop("background", False):
        raise UsageError("detach=True goes on without this notebook, and background=True in it: leave one of both out")
    until = kwargs.pop("until", None)
    return "--detach" if until is None else f"--until {until}"


def _has_argument(function: Callable[..., Any], name: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and name in inspect.getargs(code).args


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
    if shell is None and outlives(line) and what == "nbtrain.run":
        with shell_of_script():
            return call(line, named, function, args, kwargs, around)
    name = getattr(function, "__name__", "")
    names: dict[str, Any] = {ARGS: tuple(args), KWARGS: kwargs}
    # By its own name, so that a traceback says it; else, as a function that was made in another, by ours.
    if shell is None or not name.isidentifier() or shell.user_ns.get(name) is not function:
        names[FUNCTION], name = function, FUNCTION
    given = "*" + ARGS if args else ""
    given += (", " if given and kwargs else "") + (f"**{KWARGS}" if kwargs else "")
    if leaves := outlives(line):
        if what != "nbtrain.run":
            raise UsageError(f"{what} returns what it has computed: leave --detach out; {DETACHES}")
        name, given = _by_name(function, name, shell.user_ns), _given_by_name(names, shell.user_ns)
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
        run_of_it = run_cell(shell, line, title + text, {**names, **named})
        if leaves:
            return run_of_it
        result = shell.user_ns.get(RESULT)
        if type(result) is Handle and result.type_name in UNFINISHED:
            raise UsageError(f"{what}: the function returned a {result.type_name}, {UNFINISHED[result.type_name]}")
        return result
    finally:
        for one in (*names, *named, RESULT):
            shell.user_ns.pop(one, None)


def _given_by_name(names: dict[str, Any], namespace: Mapping[str, Any]) -> str:
    """The arguments, as a cell would have them: what the notebook has a name for comes home under it."""
    known = {id(value): name for name, value in namespace.items() if _is_own(name, value)}
    args, kwargs = names[ARGS], names[KWARGS]
    written = [known.get(id(value), f"{ARGS}[{at}]") for at, value in enumerate(args)]
    by_key = {key: known[id(value)] for key, value in kwargs.items() if id(value) in known and key.isidentifier()}
    names[ARGS] = tuple(None if id(value) in known else value for value in args)
    names[KWARGS] = {key: value for key, value in kwargs.items() if key not in by_key}
    written += [f"{key}={name}" for key, name in by_key.items()] + ([f"**{KWARGS}"] if names[KWARGS] else [])
    return ", ".join(written)


def _by_name(function: Any, name: str, namespace: Mapping[str, Any]) -> str:
    """A method of what the notebook has a name for, by that."""
    if name != FUNCTION or not inspect.ismethod(function):
        return name
    owner = next((one for one, value in namespace.items() if value is function.__self__ and _is_own(one, value)), "")
    return f"{owner}.{function.__name__}" if owner else name


def _is_own(name: str, value: Any) -> bool:
    return not name.startswith(("_", "nbtrain_")) and type(value) not in ATOMS


def _runs_nothing(function: Any) -> str:
    """Why a call would run nothing of it."""
    if inspect.iscoroutinefunction(function):
        return f"an async function returns a coroutine, {UNFINISHED['coroutine']}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"a function with yield returns a generator, {UNFINISHED['generator']}"
    return ""
