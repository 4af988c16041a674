"""The loops of a cell as a script of torchrun has them: loaders that are trained on are dealt out to the ranks, and
those of loops that evaluate are seen whole. Where only the run tells, as in a function that does both,
`dealt_if_training` looks whether gradients are on and a model is in training mode: as nbtrain does on the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from nbtrain.export.possible_loaders import PASS_ON, SURELY, Loaders, Possible, Scope
from nbtrain.export.text_edits import Edits

TRAINS = frozenset({"backward", "step"})
WITHOUT_GRADIENT = frozenset({"no_grad", "inference_mode"})
ITERATE = PASS_ON | {"len"}
"""calls that make something of a loader that is used as it is, also outside of a loop's head"""
BEGIN = frozenset({"iter", "tqdm", "cycle", "islice", "chain"})
"""those that are used on what is iterated alone"""


def functions(texts: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of those that train, and of those that evaluate; methods, too."""
    called: dict[str, set[str]] = {}
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                called.setdefault(node.name, set()).update(_called(node), map(_last, node.decorator_list))

    def reach(words: frozenset[str]) -> frozenset[str]:
        found: set[str] = set()
        while more := {name for name, calls in called.items() if calls & (words | found)} - found - words:
            found |= more
        return frozenset(found)

    train = reach(TRAINS)
    return train, reach(WITHOUT_GRADIENT) - train


def dealt_loops(text: str, loaders: Loaders) -> tuple[str, bool]:
    """The text, in which loops iterate `dealt(loader)`, `whole(loader)` or `dealt_if_training(loader)`, and whether
    one may see a share."""
    tree = ast.parse(text)
    possible = Possible(tree, loaders)
    edits, done = Edits(text), set[int]()
    deals = False
    for scope in ast.walk(tree):
        if not isinstance(scope, Scope):
            continue
        ways: dict[str, set[str]] = {}
        for node, unrecorded in _own(scope):
            if not isinstance(node, ast.For | ast.comprehension):
                continue
            how = _way(node, unrecorded, scope, loaders)
            for one, level in possible.leaves(node.iter, scope):
                if id(one) in done:
                    continue
                done.add(id(one))
                edits.around(one, f"{how}(", ")")
                ways.setdefault(ast.unparse(one), set()).add(how)
                deals |= how != "whole" and (level == SURELY or possible.is_parameter(one, scope))
                if level == SURELY:
                    done.update(map(id, ast.walk(one)))
        assigned = {id(one.value) for one, _ in _own(scope) if isinstance(one, ast.Assign | ast.NamedExpr)}
        for node, _ in _own(scope):
            if not (isinstance(node, ast.Call) and (called := _last(node.func)) in ITERATE):
                continue
            begins = called in BEGIN or (id(node) in assigned and called not in ("len", "list", "tuple"))
            for one in node.args:
                if id(one) in done and called != "len":
                    continue
                ways_of = ways.get(ast.unparse(one), set())
                level = possible.level(one, scope)
                if level != SURELY and not (level and (begins or ways_of)):
                    continue
                done.add(id(one))
                edits.around(one, f"{next(iter(ways_of)) if len(ways_of) == 1 else 'dealt_if_training'}(", ")")
                deals |= called != "len" and ways_of != {"whole"} and level == SURELY
    return edits.text(), deals


def _way(loop: ast.For | ast.comprehension, unrecorded: bool, scope: Scope, loaders: Loaders) -> str:
    if isinstance(loop, ast.For):
        if surely_trains(loop.body, loaders.train):
            return "dealt"
        called = set().union(*map(_called, loop.body))
        unrecorded = unrecorded or (bool(called & loaders.evaluate) and not called & (loaders.train | TRAINS))
    if not unrecorded:
        return "dealt_if_training"
    return "dealt" if _brought_together(scope) else "whole"


def _own(scope: ast.AST) -> list[tuple[ast.AST, bool]]:
    """What is in a scope, in its order, without what is in the functions in it, and whether gradients are off there."""
    off = not isinstance(scope, ast.Module) and any(
        _last(one) in WITHOUT_GRADIENT for one in getattr(scope, "decorator_list", ())
    )
    found: list[tuple[ast.AST, bool]] = []

    def visit(node: ast.AST, off: bool) -> None:
        for one in ast.iter_child_nodes(node):
            found.append((one, off))
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            inside = isinstance(one, ast.With) and any(
                _last(item.context_expr) in WITHOUT_GRADIENT for item in one.items
            )
            visit(one, off or inside)

    visit(scope, off)
    return [(one, off or _computes_without_gradient(one)) for one, off in found]


def _computes_without_gradient(node: ast.AST) -> bool:
    """A loop whose body switches gradients off, and has none."""
    return isinstance(node, ast.For) and any(
        isinstance(one, ast.With) and any(_last(item.context_expr) in WITHOUT_GRADIENT for item in one.items)
        for part in node.body
        for one in ast.walk(part)
    ) and not any(_called(part) & TRAINS for part in node.body)  # fmt: skip


def surely_trains(body: Iterable[ast.stmt], train: frozenset[str]) -> bool:
    """Whether there is a backward or a step that does not depend on an `if`."""
    for part in body:
        if isinstance(part, ast.If):
            if surely_trains(part.body, train) and surely_trains(part.orelse, train):
                return True
        elif isinstance(part, ast.With | ast.For | ast.While | ast.Try):
            if surely_trains(part.body, train):
                return True
        elif not isinstance(part, ast.FunctionDef | ast.ClassDef) and _called(part) & (TRAINS | train):
            return True
    return False


def _brought_together(scope: ast.AST) -> bool:
    """Whether the code sums up over the processes what it counts: each is to count its share then."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg for word in node.keywords}
        last = _last(node.func)
        if last in ("all_reduce", "all_gather", "all_gather_object") or (last == "gather" and "of" not in words):
            return True
        given = [*node.args[1:], *(word.value for word in node.keywords if word.arg == "op")]
        if last == "reduce" and any(isinstance(one, ast.Constant) and one.value == "sum" for one in given):
            return True
    return False


def _called(node: ast.AST) -> set[str]:
    """Names of functions and methods that are called in it."""
    return {_last(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
