"""The text of a cell whose run may be gone on from: which loops can be, and what is left of it at a place in one."""

from __future__ import annotations

import ast
import builtins
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.exchange.kinds.base import Handle
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.cell import Cell

LOOP = "resumable"
ADDS = ("append", "extend", "add", "update", "insert")
"""methods by which a list, a set, a counter or a metric counts"""
WRITE = (
    "--nodes MIN:MAX: when a machine is lost the cell's loop goes on where it was, for which it has to know its place: "
)
ONE = ". A cell without such a loop takes one number: --nodes 2"


def check_loops(cell: Cell, names: Captured, namespace: Mapping[str, Any]) -> None:
    """Raises where the cell could not go on as if nothing had been, and names the line to write instead."""
    tree = ast.parse(cell.code)
    loops = _loops(tree)
    inside = sum(map(uses, loops))
    functions = [namespace.get(name) for name in (*names.hard, *names.soft)]
    in_functions = any(
        isinstance(function, types.FunctionType) and LOOP in _names_in(function.__code__) for function in functions
    )
    if not loops or inside != uses(tree) or in_functions:
        where = ", in the cell itself and not in a function or a block" if uses(tree) or in_functions else ""
        raise UsageError(
            f"{WRITE}for epoch in resumable(range(10)): …; or for x, y in resumable(loader): …{where}{ONE}"
        )
    if any(_called(node) == "DistributedSampler" for node in ast.walk(tree)):
        raise UsageError(
            f"{WRITE}a DistributedSampler has its share forever; leave it out, batches are dealt out without"
        )
    for node in (node for loop in loops for node in ast.walk(loop)):
        if _called(node) == "enumerate":
            raise UsageError(
                f"{WRITE}enumerate would count from 0 again in the middle of an epoch. Count with a name of the cell: "
                "step = 0 above the loop, and step += 1 in it"
            )
        if _called(node) == "next":
            raise UsageError(f"{WRITE}next(…) asks an iterator that does not know its place: for x, y in loader: …")
        if isinstance(node, ast.If) and (name := _steps_in(node, namespace)):
            raise UsageError(
                f"{WRITE}{name}.step() under an if would have batches played again that have been used: leave the if "
                "out, and write --accumulate K"
            )


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a cell."""

    cell: Cell
    place: bytes
    """where its loops are"""
    line: int
    """the notebook's line of its beginning; 0: it is the whole cell"""
    anew: tuple[str, ...] = ()
    """names that the item under way sets before its inner loop, which is in the middle"""
    counted: tuple[str, ...] = ()
    """names in which a batch is counted before its backward"""


def cut(cell: Cell, place: bytes, names_of: Callable[[Cell], Captured], namespace: Mapping[str, Any]) -> Rest:
    """The cell from the loop on that was under way: what stands before it has been done, and is home. The whole cell
    where something of that could not come home."""
    places = pickle.loads(place)
    tree = ast.parse(cell.code)
    loops = _loops(tree)
    ordinal = places[0]["ordinal"] if places else 0
    over = ordinal >= len(loops)  # all of them are
    if not loops or not places:
        return Rest(cell, place, 0)
    anew = () if over else _set_before(loops[ordinal], places[0])
    counted = () if over else _counted(loops[ordinal])
    first = (loops[-1].end_lineno or 0) + 1 if over else loops[ordinal].lineno
    lines = cell.code.splitlines(keepends=True)
    rest = replace(cell, code="\n" * (first - 1) + "".join(lines[first - 1 :]))
    known = {*namespace, *vars(builtins), LOOP}
    needed = {name for name in names_of(rest).hard if name not in known or isinstance(namespace.get(name), Handle)}
    if needed & _bound([statement for statement in tree.body if statement.lineno < first]):
        return Rest(cell, place, 0, anew, counted)
    # Its loop is the first one now.
    here = [] if over else [{**places[0], "ordinal": 0}, *places[1:]]
    return Rest(rest, pickle.dumps(here, 5), first, anew, counted)


def _loops(tree: ast.Module) -> list[ast.For]:
    """The cell's own loops that know their place."""
    return [statement for statement in tree.body if isinstance(statement, ast.For) and uses(statement.iter)]


def uses(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Name) and node.id == LOOP for node in ast.walk(tree))


def _set_before(loop: ast.For, place: Mapping[str, Any]) -> tuple[str, ...]:
    """What the body of a loop sets above the loop in it, if that is in the middle."""
    if not any(loader.get("seen") is None or loader["seen"] for loader in place.get("loaders", ())):
        return ()
    inner = next(
        (at for at, statement in enumerate(loop.body) if isinstance(statement, ast.For | ast.While | ast.With)), 0
    )
    return tuple(sorted(_bound(loop.body[:inner])))


def _counted(loop: ast.For) -> tuple[str, ...]:
    """What the innermost body that trains changes, other than by an assignment, before its batch has a gradient."""
    loops = [inner for inner in ast.walk(loop) if isinstance(inner, ast.For) and trains(inner)]
    before = itertools.takewhile(lambda statement: not trains(statement), loops[-1].body if loops else ())
    return tuple(sorted({name for statement in before for node in ast.walk(statement) for name in _changes(node)}))


def trains(tree: ast.AST) -> bool:
    return any(_called(node) == "backward" for node in ast.walk(tree))


def _changes(node: ast.AST) -> Iterator[str]:
    changed: ast.AST | None = node.target if isinstance(node, ast.AugAssign) else None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
        changed = node.func.value
    if isinstance(changed, ast.Name):
        yield changed.id


def _called(node: ast.AST) -> str:
    """The last name of what is called here; empty where nothing is."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _steps_in(node: ast.If, namespace: Mapping[str, Any]) -> str:
    """The notebook's name of an optimizer that steps in there."""
    torch: Any = sys.modules.get("torch")
    for call in ast.walk(node) if torch is not None else ():
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _called(call) == "step":
            name = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
            if isinstance(namespace.get(name), torch.optim.Optimizer):
                return name
    return ""


def _names_in(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *(name for function in inner for name in _names_in(function))}


def _bound(statements: list[ast.stmt]) -> set[str]:
    """Names that these statements may bind."""
    return {name for statement in statements for node in ast.walk(statement) for name in _binds(node)}


def _binds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
