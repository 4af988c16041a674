"""Marks the loops of a text of which the script cannot see, when they begin, whether they train.

A script looks whether gradients are on and a model is in training mode, as nbtrain does on the ranks. Of a loop that
surely trains, of one that switches gradients off inside, and of one whose counts are summed up over the processes, the
text tells more."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from nbtrain.annexes.export.statements import last_name
from nbtrain.annexes.export.text_edits import Edits
from nbtrain.worker.data import loop_code
from nbtrain.worker.data.loop_code import TOGETHER, TRAINS

WITHOUT_GRADIENT = frozenset({"no_grad", "inference_mode"})
PASS_ON = frozenset({"enumerate", "tqdm", "zip", "iter", "list", "islice", "chain", "cycle", "track"})
"""calls that iterate what they are given"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def that_train(texts: Iterable[str]) -> frozenset[str]:
    """The names of functions and methods that call backward or step, or such a function."""
    called: dict[str, set[str]] = {}
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                called.setdefault(node.name, set()).update(calls(node))
    training: set[str] = set()
    while more := {name for name, of in called.items() if of & (TRAINS | training)} - training - TRAINS:
        training |= more
    return frozenset(training) | TRAINS


def calls(node: ast.AST) -> set[str]:
    """Names of functions and methods that are called in it."""
    return {last_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Call)}


def surely_trains(body: Iterable[ast.AST], train: frozenset[str]) -> bool:
    """Whether there is a call of one of these that does not depend on an `if`."""
    return loop_code.surely_trains(
        body, lambda part: not isinstance(part, Function | ast.ClassDef) and calls(part) & train
    )


def marked(text: str, namespace: Mapping[str, Any], train: frozenset[str]) -> str:
    """The text, in which such loops say `_dealt(loader)`, or `_dealt(loader, False)` where they evaluate."""
    tree, edits = ast.parse(text), Edits(text)
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | Function):
            together, off = _together(scope), _without_gradient(getattr(scope, "decorator_list", ()))
            for loop, recorded in _loops(scope, not off):
                deals = _deals(loop, recorded, together, train)
                for loader in loaders_in(loop.iter, namespace) if deals is not None else ():
                    edits.around(loader, "_dealt(", ")" if deals else ", False)")
    return edits.text()


def _deals(loop: Any, recorded: bool, together: bool, train: frozenset[str]) -> bool | None:
    """Whether a loop gets a share of the batches; None: that is seen when it begins."""
    body = loop.body if isinstance(loop, ast.For) else [loop]
    if isinstance(loop, ast.For) and surely_trains(body, train):
        return True
    inside = any(
        _without_gradient(item.context_expr for item in node.items)
        for part in body for node in ast.walk(part) if isinstance(node, ast.With)
    )  # fmt: skip
    if (not recorded or inside) and together:
        return True
    return False if inside and not set().union(*map(calls, body)) & train else None


def _loops(node: ast.AST, recorded: bool) -> Iterator[tuple[Any, bool]]:
    """Those of a scope, without those of functions in it, and whether gradients are on there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.For | ast.comprehension):
            yield child, recorded
        off = isinstance(child, ast.With) and _without_gradient(item.context_expr for item in child.items)
        yield from _loops(child, recorded and not off)


def _without_gradient(given: Iterable[ast.AST]) -> bool:
    return any(last_name(call) in WITHOUT_GRADIENT for call in given)


def _together(scope: ast.AST) -> bool:
    """Whether the code sums up over the processes what it counts: each is to count its share then."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call):
            last, words = last_name(node), {word.arg for word in node.keywords}
            given = [*node.args[1:], *(word.value for word in node.keywords if word.arg == "op")]
            summed = any(isinstance(constant, ast.Constant) and constant.value == "sum" for constant in given)
            if last in TOGETHER or (last == "gather" and "of" not in words) or (last == "reduce" and summed):
                return True
    return False


def loaders_in(node: ast.AST, namespace: Mapping[str, Any]) -> Iterator[ast.AST]:
    """What may be a loader in a loop's head: `_dealt` passes on what is none."""
    if isinstance(node, ast.Call):
        for argument in node.args if last_name(node) in PASS_ON else ():
            yield from loaders_in(argument, namespace)
    elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        value = namespace.get(node.id) if isinstance(node, ast.Name) else None
        if value is None or isinstance(value, DataLoader):
            yield node
