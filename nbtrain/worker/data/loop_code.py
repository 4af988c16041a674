"""Reads from source code what a loop does with its batches: whether it trains, and whether its counts are added up.

It reads the text around an iteration when that begins, from the function that iterates the loader out to the cell, and
the names in the functions that this text calls; not what these call in turn. Without source code nothing is known.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from nbtrain.base.installed_files import is_installed
from nbtrain.compat import python

TRAINS = frozenset({"backward", "step"})
WITHOUT_GRADIENT = {"no_grad", "inference_mode", "set_grad_enabled"}
TOGETHER = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "gather_object", "gather_for_metrics",
}  # fmt: skip
"""Calls that bring the ranks' own values together, beside `reduce(value, "sum")` and `gather(value)`."""

_SHELL = re.compile(r"^([^\S\n]*)(?:%{1,2}|!|\?)", re.MULTILINE)
"""A line with a magic or a shell command."""
NOTHING = object()
"""The value of what is not known."""
WHOLE = "", 0
"""The key of a whole file or cell among its functions."""
NAMES = (ast.Attribute, ast.Name)

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


class UserFrame:
    """A frame of the user's code, and its current line."""

    def __init__(self, frame: FrameType, scope: Scope, line: int = 0) -> None:
        """`line`: another line than the current one."""
        self.frame = frame
        self.scope = scope
        self.line = line or frame.f_lineno

    def value(self, node: ast.AST) -> Any:
        """The value of a name, an attribute or an item, found without calling anything; else NOTHING."""
        if isinstance(node, ast.Name):
            local, names = self.frame.f_locals, self.frame.f_globals
            return local[node.id] if node.id in local else names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return _attribute(owner, node.attr) if owner is not NOTHING else NOTHING
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value), self.value(node.slice)
            if isinstance(owner, (dict, list, tuple)) and isinstance(key, (str, int)):
                with suppress(KeyError, IndexError, TypeError):
                    return owner[key]  # type: ignore[index]  # or the key does not fit
            return NOTHING
        return node.value if isinstance(node, ast.Constant) else NOTHING

    def loop(self) -> ast.For | ast.AsyncFor | ast.comprehension | None:
        """The loop that begins at this line."""
        loops = [node for node in _loops(self.scope) if node.iter.lineno <= self.line <= _end(node.iter)]
        return min(loops, key=lambda node: _end(node.iter) - node.iter.lineno, default=None)

    def loops_around(self) -> list[ast.For | ast.AsyncFor | ast.While]:
        """Those whose body this line is in."""
        loops = [node for node in _inside(self.scope) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
        return [node for node in loops if node.body[0].lineno <= self.line <= _end(node.body[-1])]

    def statement(self) -> ast.stmt | None:
        """The innermost statement at this line."""
        statements = [
            node
            for node in _inside(self.scope)
            if isinstance(node, ast.stmt) and node.lineno <= self.line <= _end(node)
        ]
        return min(statements, key=lambda node: _end(node) - node.lineno, default=None)


def places() -> list[UserFrame]:
    """The user's frames that led here, the innermost first."""
    frames = []
    frame: FrameType | None = python.caller()
    while frame is not None:
        if not is_installed(frame.f_code.co_filename) and (scope := _scope(frame.f_code, frame.f_globals)):
            frames.append(UserFrame(frame, scope))
        frame = frame.f_back
    return frames


def updates_statistics() -> bool:
    """Whether this runs for torch's `update_bn`, or one like it: running statistics are to be those of all batches."""
    frame: FrameType | None = python.caller()
    while frame is not None and frame.f_code.co_name != "update_bn":
        frame = frame.f_back
    return frame is not None


def evaluates(around: list[UserFrame], models: Iterable[torch.nn.Module]) -> bool:
    """Whether the loop that begins here, with gradients on, surely does not train. `models`: the cell's."""
    if not around or (loop := around[0].loop()) is None:
        return False
    return _evaluates(loop, around[0], models)


def length_of_evaluation(around: list[UserFrame], loader: object, models: Iterable[torch.nn.Module]) -> bool | None:
    """Whether the function that asks for a loader's length evaluates with it, without reducing what it counts. None: it
    does not iterate the loader."""
    if not around:
        return None
    here, models_there, answers = around[0], list(models), set()
    for loop in _loops(here.scope):
        if any(here.value(node) is loader for node in ast.walk(loop.iter) if isinstance(node, ast.expr)):
            there = UserFrame(here.frame, here.scope, loop.iter.lineno)
            every_batch = (
                not torch.is_grad_enabled()
                or _without_gradient(loop, here.scope)
                or _evaluates(loop, here, models_there)
            )
            answers.add(every_batch and not brought_together([there, *around[1:]]))
    return answers.pop() if len(answers) == 1 else None


def brought_together(around: list[UserFrame]) -> bool:
    """Whether the code itself reduces or gathers what the loop that begins here counts."""
    for here, names in _counts(around):
        for node in _inside(here.scope):
            if (
                isinstance(node, ast.Call)
                and _together(node, here)
                and any(_mentions(part, names) for part in (*node.args, *(word.value for word in node.keywords)))
            ):
                return True
    return False


# -- what a loop counts -------------------------------------------------------------------------


def _counts(around: list[UserFrame]) -> Iterator[tuple[UserFrame, set[str]]]:
    """Per frame: the names that depend on the loop's batches."""
    for depth, here in enumerate(around):
        loop = here.loop() if depth == 0 else None
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            names = _assigned(loop.body) | set(_bases(loop.target))
        else:
            statement = here.statement()
            names = _assigned([statement]) if statement is not None and not hasattr(statement, "body") else set()
        yield here, _onward(here.scope, names)


def _assigned(body: Iterable[ast.AST]) -> set[str]:
    """Names and attributes that are assigned here, or on which a method is called."""
    names = set()
    for node in (node for part in body for node in (part, *_inside(part))):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value.func
            targets = [call.value] if isinstance(call, ast.Attribute) else []
        names |= {name for target in targets for name in _bases(target)}
    return names


def _onward(scope: Scope, names: set[str]) -> set[str]:
    """These names, and all that this function computes from them."""
    assigned = [node for node in _inside(scope) if isinstance(node, (ast.Assign, ast.AugAssign))]
    reached, before = set(names), -1
    while len(reached) != before:
        before = len(reached)
        for node in assigned:
            if _mentions(node.value, reached):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                reached |= {name for target in targets for name in _bases(target)}
    return reached


def _bases(target: ast.expr) -> list[str]:
    """`total` of `total`, `sums["a"]` → `sums`, `self.total`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in _bases(part)]
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    return [ast.unparse(target)] if isinstance(target, (ast.Name, ast.Attribute)) else []


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.Attribute) and ast.unparse(part) in names)
        for part in ast.walk(node)
    )


def _together(call: ast.Call, here: UserFrame) -> bool:
    """Whether this call reduces or gathers over the ranks."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in TOGETHER:
        return True
    value = here.value(call.func)
    if value is NOTHING or str(getattr(value, "__module__", "")).startswith("nbtrain.worker"):  # a rank's built-in
        if not isinstance(call.func, ast.Name) or name not in ("reduce", "gather"):
            return False
        given = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "op")]
        return name == "gather" or any(
            getattr(argument, "value", "sum") not in ("mean", "min", "max") for argument in given
        )
    used = _names_in(value)
    return bool(used & (TOGETHER | {"gather"})) or {"reduce", "sum"} <= used


# -- whether it trains --------------------------------------------------------------------------


def _evaluates(loop: ast.For | ast.AsyncFor | ast.comprehension, here: UserFrame, models: Iterable[Any]) -> bool:
    body: list[ast.AST] = list(loop.body) if not isinstance(loop, ast.comprehension) else [here.statement() or loop]
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for part in body for node in ast.walk(part)):
        return False  # its batches are used elsewhere
    if surely_trains(body, lambda part: _used(part, here) & TRAINS):
        return False
    named = [here.value(node) for part in body for node in ast.walk(part) if isinstance(node, NAMES)]
    computing = _with_weights(named) or _with_weights(models)
    if computing and not any(model.training for model in computing):
        return True
    used = set().union(*(_used(part, here) for part in body))
    return bool(used & WITHOUT_GRADIENT and not used & TRAINS)


def _with_weights(values: Iterable[Any]) -> list[torch.nn.Module]:
    return [
        value for value in values if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None
    ]


def surely_trains(body: Iterable[ast.AST], trains: Callable[[ast.AST], Any]) -> bool:
    """Whether there is a backward or a step that does not depend on an `if`. `trains`: whether a statement has one."""
    return any(
        surely_trains(part.body, trains) and surely_trains(part.orelse, trains) if isinstance(part, ast.If)
        else surely_trains(part.body, trains) if isinstance(part, (ast.With, ast.For, ast.While, ast.Try))
        else bool(trains(part)) for part in body
    )  # fmt: skip


def _without_gradient(loop: ast.AST, scope: Scope) -> bool:
    """Whether the loop is inside of `with torch.no_grad():`."""
    return any(
        isinstance(node, ast.With)
        and any(_named(item.context_expr) & {"no_grad", "inference_mode"} for item in node.items)
        and any(part is loop for part in ast.walk(node))
        for node in _inside(scope)
    )


def _named(node: ast.AST) -> set[str]:
    return {part.attr if isinstance(part, ast.Attribute) else part.id for part in ast.walk(node)
            if isinstance(part, (ast.Attribute, ast.Name))}  # fmt: skip


def _used(node: ast.AST, here: UserFrame) -> set[str]:
    """The names in this text, and in the user's functions that it names."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, NAMES):
            names |= {part.attr} if isinstance(part, ast.Attribute) else {part.id} - TRAINS  # `step` is a number there
            names |= _names_in(here.value(part))
    return names


def _names_in(value: Any) -> set[str]:
    """The names and strings in a function of the user's."""
    function = getattr(value, "__func__", value)
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or is_installed(function.__code__.co_filename):
        return set()
    names, ahead = set(), [function.__code__]
    while ahead:
        code = ahead.pop()
        names |= {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
        ahead += [const for const in code.co_consts if isinstance(const, CodeType)]
    return names


# -- text ---------------------------------------------------------------------------------------


def _scope(code: CodeType, names: dict[str, Any]) -> Scope | None:
    """The syntax tree of a function, or of the cell or module."""
    lines = linecache.getlines(code.co_filename, names)
    key = WHOLE if code.co_name.startswith(("<module", "<cell")) else (code.co_name, code.co_firstlineno)
    return _scopes("".join(lines)).get(key) if lines else None


@lru_cache(maxsize=64)
def _scopes(text: str) -> dict[tuple[str, int], Scope]:
    """The functions in source code, by name and first line; none of code that cannot be parsed."""
    for attempt in (text, _SHELL.sub(r"\1pass  #", text)):
        try:
            tree = ast.parse(attempt)
        except (SyntaxError, ValueError, RecursionError):
            continue
        scopes: dict[tuple[str, int], Scope] = {WHOLE: tree}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                scopes[node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])] = node
        return scopes
    return {}


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function, without those of functions in it."""
    ahead = list(ast.iter_child_nodes(scope))
    while ahead:
        node = ahead.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            ahead += ast.iter_child_nodes(node)


def _loops(scope: Scope) -> list[ast.For | ast.AsyncFor | ast.comprehension]:
    return [node for node in _inside(scope) if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension))]


def _end(node: Any) -> int:
    return int(node.end_lineno or node.lineno)


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of an object or its class, found without running properties."""
    attributes = getattr(owner, "__dict__", {})
    if name in attributes:
        return attributes[name]
    if isinstance(owner, torch.nn.Module):
        for child, module in owner.named_children():
            if child == name:
                return module
    for cls in type(owner).__mro__:
        if name in vars(cls):
            attribute = vars(cls)[name]
            attribute = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
            return MethodType(attribute, owner) if isinstance(attribute, FunctionType) else attribute
    return NOTHING
