"""The loops of a cell as a script of torchrun has them: loaders that are trained on are dealt out to the ranks, and
those of loops that evaluate are seen whole."""

from __future__ import annotations

import ast
from collections.abc import Iterable

TRAINS = frozenset({"backward", "step"})


def dealt_loops(text: str, loaders: Iterable[str]) -> tuple[str, bool]:
    """The text, in which loops that train iterate `dealt(loader)` and others `whole(loader)`, and whether one trains.
    `loaders`: names that hold one; a parameter of a function may be one, too."""
    tree = ast.parse(text)
    edits: dict[tuple[int, int, int], str] = {}
    trains = False
    for scope in ast.walk(tree):
        names = set(loaders)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {one.arg for one in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}
        elif not isinstance(scope, ast.Module):
            continue
        for loop in _own(scope):
            if not isinstance(loop, ast.For | ast.comprehension):
                continue
            how = "dealt" if isinstance(loop, ast.For) and _trains(loop) else "whole"
            for one in ast.walk(loop.iter):
                if isinstance(one, ast.Name) and one.id in names:
                    edits[one.lineno, one.col_offset, one.end_col_offset or 0] = f"{how}({one.id})"
                    trains |= how == "dealt"
    lines = text.splitlines(keepends=True)
    for (line, start, end), name in sorted(edits.items(), reverse=True):
        raw = lines[line - 1].encode()
        lines[line - 1] = (raw[:start] + name.encode() + raw[end:]).decode()
    return "".join(lines), trains


def _own(scope: ast.AST) -> Iterable[ast.AST]:
    """What is in a scope, without what is in the functions in it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def _trains(loop: ast.For) -> bool:
    """Whether it steps itself: a loop over epochs around it does so by its inner one."""
    for node in _of_this_loop(loop.body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TRAINS:
            return True
    return False


def _of_this_loop(body: list[ast.stmt]) -> Iterable[ast.AST]:
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.For | ast.FunctionDef | ast.ClassDef):
            todo += ast.iter_child_nodes(node)
