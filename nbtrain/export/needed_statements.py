"""Finds the statements of a notebook's history that a cell needs: a slice by names, backwards from the cell."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"})
WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL", "DELETE_NAME"})
SHOWS = frozenset({"print", "display", "help", "dir", "type", "len", "repr", "plt", "show", "head", "describe", "info"})
"""calls of these, as statements of their own, change nothing"""
SEEDS = frozenset({"manual_seed", "seed", "seed_everything", "set_seed"})
DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "uniform", "shuffle", "choice", "choices", "permutation",
        "sample", "default_rng", "bernoulli", "multinomial", "rand_like", "randn_like", "random_sample", "make_blobs",
        "make_classification", "make_moons", "train_test_split", "random_split",
    }
)  # fmt: skip


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
    changes: frozenset[str] = frozenset()
    """names whose objects it may change"""
    words: frozenset[str] = frozenset()
    """names and attributes in it"""

    @property
    def seeds(self) -> bool:
        return bool(SEEDS & self.words) and isinstance(self.node, ast.Expr)

    @property
    def draws(self) -> bool:
        defines = isinstance(self.node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
        return bool(DRAWS & self.words) and not defines

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
        found.append(_described(cell, text, node))
    return found


def needed(history: list[Statement], names: Iterable[str], known: frozenset[str] = frozenset()) -> Slice:
    """Of the history, in its order. `known`: names that need not be found, as builtins."""
    late = _late_reads(history)
    wanted = _with_late(names, late)
    asked, found = set(wanted), []
    for one in reversed(history):
        if isinstance(one.node, ast.Delete):  # what is read afterwards is another object of that name, or none
            wanted -= one.binds
            continue
        if not (one.binds & wanted or one.changes & wanted or (one.seeds and wanted)):
            continue
        found.append(one)
        if not isinstance(one.node, ast.If | ast.For | ast.While | ast.Try | ast.With):  # they may not have bound it
            wanted -= one.binds - one.changes
        reads = _with_late(one.reads, late)
        wanted |= reads | one.changes
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


def _with_late(names: Iterable[str], late: dict[str, set[str]]) -> set[str]:
    found, todo = set(), list(names)
    while todo:
        if (name := todo.pop()) not in found:
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
        frozenset(one.argval for one in own if one.opname in WRITES), frozenset(changes(node)), frozenset(words),
    )  # fmt: skip


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _instructions(code: CodeType) -> Iterator[Any]:
    yield from dis.get_instructions(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _instructions(const)


def changes(node: ast.stmt) -> Iterator[str]:
    """Names whose objects a statement may change: by an attribute, an item, a method, or as an argument of a call whose
    result nobody takes."""
    if _defines(node):
        return
    for one in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(one, ast.Assign):
            targets = one.targets
        elif isinstance(one, ast.AugAssign | ast.AnnAssign | ast.For):
            targets = [one.target]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and (name := _root(target)):
                yield name
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            yield from _changed_by(one.value)


def _changed_by(call: ast.Call) -> Iterator[str]:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    root = _root(call.func)
    if last in SHOWS or root in SHOWS:
        return
    if isinstance(call.func, ast.Attribute) and root:
        yield root
    for given in (*call.args, *(word.value for word in call.keywords)):
        for one in ast.walk(given):
            if isinstance(one, ast.Name):
                yield one.id


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
