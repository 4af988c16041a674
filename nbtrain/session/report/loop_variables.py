"""Names that a cell's loops leave behind: `x, y` of `for x, y in loader`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)  # fmt: skip
"""Names that are assigned in these are not the cell's."""


def loop_variables(code: str) -> frozenset[str]:
    """Loop variables that are assigned nowhere else but in their own loop (`x = x.to(device)`)."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # a top-level await, say
        return frozenset()
    passing: set[str] = set()
    others: set[str] = set()
    _look(tree, frozenset(), passing, others)
    return frozenset(passing - others)


def _look(node: ast.AST, of_loops: frozenset[str], passing: set[str], others: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.For, ast.AsyncFor)):
            targets = frozenset(_stored(child.target))
            passing |= targets
            for part in (*child.body, *child.orelse):
                _look(ast.Module([part], []), of_loops | targets, passing, others)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            if child.id not in of_loops:
                others.add(child.id)
        elif not isinstance(child, SCOPES):
            _look(child, of_loops, passing, others)


def _stored(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
