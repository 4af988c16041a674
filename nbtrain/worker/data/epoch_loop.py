"""Which epoch a loader's iteration is, and of how many, as the loop around it says.

`for epoch in range(60)`, `trange(epochs)`, `tqdm(range(10))`, `resumable(range(cfg.epochs))`, in the cell or in a
function. The number is the loop variable's: a loader that is iterated twice in an epoch counts once, and a run that
goes on in the middle of its loop is where it is. Where more than one loop is around, nothing is known. A loop around
`iter(loader)` may count steps: it counts epochs if the loader is iterated with it from the first one on.
"""

from __future__ import annotations

import ast
import builtins

from nbtrain.worker.data.loop_code import NOTHING, UserFrame, places

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
        value = here.value(over)
        value = getattr(value, "__dict__", {}).get("iterable", value)  # a progress bar that was given a name
        return value if isinstance(value, range) else None
    name = over.func.attr if isinstance(over.func, ast.Attribute) else getattr(over.func, "id", "")
    if name in GOES_OVER and over.args:
        return _range(over.args[0], here)
    if name != "trange" and (name != "range" or here.value(over.func) not in (builtins.range, NOTHING)):
        return None
    bounds = [here.value(argument) for argument in over.args]
    known = 0 < len(bounds) <= 3 and all(type(bound) is int for bound in bounds) and bounds[2:] != [0]
    return range(*bounds) if known else None
