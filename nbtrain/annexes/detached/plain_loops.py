"""A cell's plain loops know their place in a detached run, as if `resumable` were written around what they go over."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

from nbtrain.notebook.cell import Cell
from nbtrain.notebook.run.elastic_cell import LOOP, trains, uses


def with_resumable(cell: Cell, namespace: Mapping[str, Any]) -> Cell:
    """`for epoch in range(90)` and `for x, y in loader` of the cell itself that train, each in its line. The same cell
    where the user has written `resumable`, or has something else of that name."""
    tree = ast.parse(cell.code)
    if LOOP in namespace or uses(tree):
        return cell
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known = {name: value for name, value in namespace.items() if name not in bound}
    lines = [line.encode() for line in StringIO(cell.code, newline="").readlines()]  # the lines that Python counts
    for loop in reversed(tree.body):
        if isinstance(loop, ast.For) and trains(loop) and _is_plain(loop.iter, known):
            over = loop.iter
            for at, column, text in (
                (over.end_lineno or 0, over.end_col_offset or 0, b")"), (over.lineno, over.col_offset, b"resumable("),
            ):  # fmt: skip
                line = lines[at - 1]
                lines[at - 1] = line[:column] + text + line[column:]
    return replace(cell, code=b"".join(lines).decode())


def _is_plain(over: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """What begins anew, in the same way, each time that it is gone over."""
    from torch.utils.data import DataLoader

    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        return over.func.id == "range" and "range" not in namespace
    return isinstance(over, ast.Name) and isinstance(namespace.get(over.id), DataLoader | range)
