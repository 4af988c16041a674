"""Finds in the syntax which names one statement looks up and binds, and which of them whatever its values are."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbtrain.exchange.names.code_globals import CodeNames

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_LAZY = tuple(getattr(ast, name) for name in ("Lambda", "TypeAlias") if hasattr(ast, name))


@dataclass(slots=True)
class StatementNames:
    """What a statement does with names."""

    found: CodeNames
    stored: set[str] = field(default_factory=set)
    """bound or deleted whatever its values are"""
    loaded: dict[str, int] = field(default_factory=dict)
    """looked up whatever its values are → line"""


_FIRST: dict[type, Callable[[Any], list[ast.expr]]] = {
    ast.BoolOp: lambda node: node.values[:1],
    ast.IfExp: lambda node: [node.test],
    ast.Assert: lambda node: [node.test],
    ast.Compare: lambda node: [node.left, node.comparators[0]],
}
"""What is evaluated for sure of those that may leave out the rest."""


def names_of(root: ast.AST, code_names: CodeNames) -> StatementNames:
    """The names of a statement or expression. `code_names`: those in its bytecode."""
    names = StatementNames(code_names)
    for name in _surely_evaluated(root):
        if isinstance(name.ctx, ast.Store):
            names.stored.add(name.id)
        else:
            names.loaded.setdefault(name.id, name.lineno)
    if isinstance(root, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names.stored.add(root.name)
        if root.name not in _evaluated_now(root):
            # a function that calls itself, a method that names its class: the new one, not the notebook's
            names.found = code_names._replace(reads=code_names.reads - {root.name})
    elif isinstance(root, (ast.Import, ast.ImportFrom)):
        names.stored |= code_names.writes
    elif isinstance(root, ast.Delete):
        names.stored |= {target.id for target in root.targets if isinstance(target, ast.Name)}
    return names


def may_leave(node: ast.AST, how: tuple[type[ast.AST], ...]) -> bool:
    """Whether one of these statements is inside the node, functions in it included."""
    ahead: list[ast.AST] = [node]
    while ahead:
        node = ahead.pop()
        if isinstance(node, how):
            return True
        for block in _BLOCKS:
            inner = getattr(node, block, None)
            if type(inner) is list:
                ahead += inner
    return False


def _evaluated_now(node: ast.AST) -> set[str]:
    """The names looked up while a definition is made, rather than when what it defines is called."""
    names: set[str] = set()
    ahead: list[ast.AST | None] = [node]
    while ahead:
        part = ahead.pop()
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            ahead += [*part.decorator_list, *part.args.defaults, *part.args.kw_defaults]
        elif isinstance(part, ast.Lambda):
            ahead += [*part.args.defaults, *part.args.kw_defaults]
        elif part is not None:
            ahead += ast.iter_child_nodes(part)
    return names


def _surely_evaluated(root: ast.AST) -> Iterator[ast.Name]:
    """The names a statement looks up or binds whatever its values are: no bodies, no right side of `and`."""
    ahead: list[ast.AST | None] = [root]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Name):
            yield node
        elif node is not None:
            ahead += reversed(_parts(node))


def _parts(node: ast.AST) -> list[ast.AST | None]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if isinstance(node, _LAZY):
        return [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, ast.Lambda) else []
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return [node.generators[0].iter]
    if type(node) in _FIRST:
        return [*_FIRST[type(node)](node)]
    if isinstance(node, ast.AnnAssign):
        return [node.value, node.target] if node.value is not None else []
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        return [read, node.target, node.value]
    return list(ast.iter_child_nodes(node))
