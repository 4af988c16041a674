"""Which epoch a loader's iteration is, and of how many, as the loop around it says.

`for epoch in range(60)`, `trange(epochs)`, `tqdm(range(10))`, `resumable(range(cfg.epochs))`, in the cell or in a
function. The number is the loop variable's: a loader that is iterated twice in an epoch counts once, and a run that
goes on in the middle of its loop is where it is. Where more than one loop is around, nothing is known. A loop around
`iter(loader)` may count steps: it counts epochs if the loader is iterated with it from the first one on.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Any

from nbtrain.training.data.loop_code import NOTHING, UserFrame, places

GOES_OVER = frozenset({"tqdm", "resumable", "track", "progress_bar"})
"""What goes over its first argument."""


def epoch_around(begun: int) -> tuple[int, int] | None:
    """(number from zero, how many); called below a loader's `iter`. `begun`: its iterations in this cell before."""
    frames = places()
    its_own = frames[0].loop() if frames else None  # the one over the loader may stand in one line
    around = [(loop, here) for here in frames for loop in here.loops_around() if loop is not its_own]
    if len(around) != 1:
        return None
    loop, here = around[0]
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return None
    over, now = _range(loop.iter, here), here.value(loop.target)
    if over is None or type(now) is not int or now not in over:
        return None
    number = over.index(now)
    return (number, len(over)) if its_own is not None or number == begun else None


def _range(over: ast.expr, here: UserFrame) -> range | None:
    if not isinstance(over, ast.Call):
        found = here.value(over)
        if _bar(type(found)):  # it was given a name
            found = getattr(found, "iterable", None)
        return found if isinstance(found, range) else None
    meant = here.value(over.func)
    name = _bar(meant) or (over.func.attr if isinstance(over.func, ast.Attribute) else getattr(over.func, "id", ""))
    if name in GOES_OVER and over.args:
        return _range(over.args[0], here)
    of_python = name == "trange" or (name == "range" and (meant is builtins.range or meant is NOTHING))
    bounds = list(_numbers(over.args, here))
    if not of_python or not bounds or len(bounds) < len(over.args) or len(bounds) > 3 or bounds[2:] == [0]:
        return None
    return range(*bounds)


def _bar(meant: Any) -> str:
    """What tqdm calls it, whatever name it was imported under; empty if it is not tqdm's."""
    if str(getattr(meant, "__module__", "")).partition(".")[0] != "tqdm":
        return ""
    return "tqdm" if isinstance(meant, type) else "trange"


def _numbers(nodes: list[ast.expr], here: UserFrame) -> Iterator[int]:
    """Those that are known."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv):
            both = list(_numbers([node.left, node.right], here))
            if len(both) == 2 and (both[1] or not isinstance(node.op, ast.FloorDiv)):
                yield _computed(node.op, *both)
        elif type(value := here.value(node)) is int:
            yield value


def _computed(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    return left * right if isinstance(op, ast.Mult) else left // right
