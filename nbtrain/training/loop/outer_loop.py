"""How many epochs there will be: what the loop around a loader's goes over, as far as the cell's text tells.

`for epoch in range(60)`, `trange(epochs)`, `tqdm(range(10))`, `resumable(range(cfg.epochs))`, a list. Nothing is run
for it: numbers are looked up, and what would have to be called is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from types import FrameType
from typing import Any

from nbtrain.compat.python import caller

COUNTS = frozenset({"range", "trange"})
GOES_OVER = frozenset({"tqdm", "resumable", "enumerate", "list", "reversed", "track", "progress_bar"})
"""What has as many items as its first argument."""


def outer_loop(code: str, namespace: Mapping[str, Any]) -> int | None:
    """Items of the outermost loop that the cell is in. The loop over a loader, which is about to begin, is none."""
    frame: FrameType | None = caller()
    while frame is not None and not (frame.f_globals is namespace and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return None if frame is None else items_around(code, frame.f_lineno, namespace)


def items_around(code: str, line: int, namespace: Mapping[str, Any]) -> int | None:
    loop = next((one for one in _outermost(code) if one.body[0].lineno <= line <= (one.end_lineno or 0)), None)
    return None if loop is None else _items(loop.iter, namespace)


@lru_cache(maxsize=4)
def _outermost(code: str) -> list[ast.For]:
    try:
        return _loops(ast.parse(code).body)
    except (SyntaxError, ValueError):
        return []


def _loops(body: list[ast.stmt]) -> list[ast.For]:
    """The outermost ones, also in blocks."""
    found = []
    for statement in body:
        if isinstance(statement, ast.For):
            found.append(statement)
        elif isinstance(statement, ast.With | ast.If | ast.Try | ast.While):
            found += _loops([*statement.body, *getattr(statement, "orelse", []), *getattr(statement, "finalbody", [])])
    return found


def _items(over: ast.expr, namespace: Mapping[str, Any]) -> int | None:
    if isinstance(over, ast.List | ast.Tuple):
        return None if any(isinstance(one, ast.Starred) for one in over.elts) else len(over.elts)
    if isinstance(over, ast.Name):
        value = namespace.get(over.id)
        return len(value) if isinstance(value, list | tuple | range) else None
    if not isinstance(over, ast.Call) or not over.args:
        return None
    name = over.func.attr if isinstance(over.func, ast.Attribute) else getattr(over.func, "id", "")
    if name in GOES_OVER:
        return _items(over.args[0], namespace)
    bounds = [_number(one, namespace) for one in over.args]
    known = [one for one in bounds if one is not None]
    if name not in COUNTS or len(known) < len(bounds) or len(bounds) > 3 or (len(bounds) == 3 and not known[2]):
        return None
    return len(range(*known))


def _number(text: ast.expr, namespace: Mapping[str, Any]) -> int | None:
    value: Any = None
    if isinstance(text, ast.Constant):
        value = text.value
    elif isinstance(text, ast.Name):
        value = namespace.get(text.id)
    elif isinstance(text, ast.Attribute) and isinstance(text.value, ast.Name):
        value = getattr(namespace.get(text.value.id), "__dict__", {}).get(text.attr)
    elif isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv):
        left, right = _number(text.left, namespace), _number(text.right, namespace)
        if left is None or right is None or (isinstance(text.op, ast.FloorDiv) and not right):
            return None
        value = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}.get(type(text.op))
        value = left // right if value is None else value
    return value if type(value) is int else None
