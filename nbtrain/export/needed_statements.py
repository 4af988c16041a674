"""Finds the statements of a notebook's history that a cell needs: a slice by names, backwards from the cell.

A statement is needed if it binds a name that is, or may change its object, under this name or another one (effects.py).
In doubt it is kept: order is as it was, so what is kept in vain changes nothing that is needed.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from nbtrain.export.effects import Effect, Effects
from nbtrain.export.known_calls import EVERY, writes_file
from nbtrain.export.text_edits import Edits

READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"})
WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL", "DELETE_NAME"})
COMPOUND = (ast.If, ast.For, ast.While, ast.Try, ast.With)


@dataclass(slots=True)
class Statement:
    """One statement of a cell that was run."""

    cell: int
    text: str
    node: ast.stmt
    reads: frozenset[str] = frozenset()
    """names that it reads when it is run"""
    late: frozenset[str] = frozenset()
    """names that functions in it read when they are called"""
    binds: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    """names and attributes in it"""
    effect: Effect = field(default_factory=Effect)
    """once the history before it has been followed"""

    @property
    def changes(self) -> frozenset[str]:
        """Names whose objects it may change."""
        return self.effect.changes

    @property
    def imports(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)


@dataclass(slots=True)
class Slice:
    """What a cell needs."""

    statements: list[Statement] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """names that no statement of the history binds"""


def statements(cell: int, source: str) -> list[Statement]:
    """Those of one cell. Magics, and calls of the shell, are not the notebook's own."""
    found = []
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) or ast.unparse(node)
        if node_decorators := getattr(node, "decorator_list", None):
            first = min(one.lineno for one in node_decorators)
            text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        if "get_ipython" in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}:
            continue
        if isinstance(node, COMPOUND) and (without := _without_writes(text)) != text:
            text, node = without, ast.parse(without).body[0]
        found.append(_described(cell, text, node))
    return found


def _without_writes(text: str) -> str:
    """A script that saved what a loop of the notebook has saved would overwrite it, with other weights."""
    edits = Edits(text)

    def leave_out(body: list[ast.stmt]) -> None:
        for one in body:
            calls = [item.context_expr for item in one.items] if isinstance(one, ast.With) else []
            calls += [one.value] if isinstance(one, ast.Expr) else []
            if any(isinstance(call, ast.Call) and writes_file(call) for call in calls):
                edits.replace((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0), "pass")
            elif not _defines(one):
                for part in (one, *getattr(one, "handlers", ())):
                    for name in ("body", "orelse", "finalbody"):
                        leave_out(getattr(part, name, []))

    leave_out(getattr(ast.parse(text).body[0], "body", []) + getattr(ast.parse(text).body[0], "orelse", []))
    return edits.text()


def follow(history: list[Statement], still: frozenset[str] = frozenset()) -> None:
    """Finds the effects of each. `still`: names whose objects nothing changes, as numbers."""
    effects = Effects(still)
    for one in history:
        one.effect = effects.of(one.node)
        one.binds |= one.effect.binds_inside
        if isinstance(one.node, COMPOUND):
            one.reads &= one.effect.reads_first


def read_first(source: str) -> frozenset[str]:
    """Names that it does not bind itself before it reads them."""
    tree = ast.parse(source)
    late = [name for one in statements(0, source) for name in one.late]
    return Effects().of(tree).reads_first | frozenset(late)


def needed(
    history: list[Statement], names: Iterable[str], known: frozenset[str] = frozenset(),
    saved: frozenset[str] = frozenset(), still: frozenset[str] = frozenset(),
) -> Slice:  # fmt: skip
    """Of the history, in its order. `known`: names that need not be found, as builtins; `saved`: those that
    are read from a file, as they are at the end of the history."""
    follow(history, still)
    late = _late_reads(history)
    wanted = _with_late(set(names) - saved, late, saved)
    asked, found = set(wanted), []
    drawn = set(EVERY)
    """libraries whose random numbers what is kept may draw, from a seed before it"""
    for one in reversed(history):
        gone = isinstance(one.node, ast.Delete)
        if gone:  # what is read afterwards is another object of that name, or none
            wanted -= one.binds
        binds = bool(one.binds & wanted) and not gone
        changes = bool(one.changes & wanted) and not one.effect.changed <= saved and not one.effect.writes
        if not (binds or changes or (one.effect.seeds & drawn and wanted)):
            continue
        found.append(one)
        if not _defines(one.node) and not one.imports:
            sure = frozenset() if isinstance(one.node, COMPOUND) else one.effect.seeds
            drawn = {*(EVERY - sure), *one.effect.draws}
        if not isinstance(one.node, COMPOUND):  # they may not have bound it
            wanted -= one.binds
        reads = _with_late(one.reads, late, saved)
        wanted |= reads
        asked |= reads
    bound = set().union(*(one.binds for one in found))
    return Slice(found[::-1], asked - bound - known)


def _late_reads(history: list[Statement]) -> dict[str, set[str]]:
    """Name → what is read when it, or what was made of it, is called: of functions, classes, and their objects."""
    found: dict[str, set[str]] = {}
    size = -1
    while size != (size := sum(map(len, found.values()))):
        for one in history:
            for name in one.binds:
                of = found.setdefault(name, set())
                of |= one.late
                for read in one.reads if not one.imports else ():
                    of |= found.get(read, set())
    return found


def _with_late(names: Iterable[str], late: dict[str, set[str]], saved: frozenset[str]) -> set[str]:
    found, todo = set(), list(names)
    while todo:
        if (name := todo.pop()) not in found and name not in saved:
            found.add(name)
            todo += late.get(name, ())
    return found


def _described(cell: int, text: str, node: ast.stmt) -> Statement:
    code = compile(ast.Module([node], []), "<cell>", "exec")
    own = list(dis.get_instructions(code))
    nested = [one for const in code.co_consts if isinstance(const, CodeType) for one in _instructions(const)]
    reads = {one.argval for one in own if one.opname in READS}
    late = {one.argval for one in nested if one.opname in READS}
    if not _defines(node):  # comprehensions and lambdas of an expression
        reads = reads | late
    words = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    words |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return Statement(
        cell, text, node, frozenset(reads), frozenset(late),
        frozenset(one.argval for one in own if one.opname in WRITES), frozenset(words),
    )  # fmt: skip


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _instructions(code: CodeType) -> Iterator[Any]:
    yield from dis.get_instructions(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _instructions(const)
