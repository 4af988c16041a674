"""Which of the notebook's names a cell reads; refuses names that do not exist."""

from __future__ import annotations

import builtins
import difflib
import linecache
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import nbtrain.machine.registry as registry
from nbtrain.base.errors import MissingName, UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.compat import namespaces
from nbtrain.exchange.names.cell_names import Captured, CellNames, analyse, of_ipython, reach
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.notebook.cell import Cell

ON_RANKS = frozenset((
    "rank", "world_size", "local_rank", "device", "log", "reduce", "gather", "barrier", "setup", "whole", "save",
    "load", "resumable", "get_ipython", "display",
))  # fmt: skip
"""Names that every rank has in its builtins."""


def captured(cell: Cell, namespace: dict[str, Any], places: NameOrder, run: RunSpec | None = None) -> Captured:
    """The notebook's names that this cell needs, also for the strategy and the options of `run`: both may be the
    notebook's. Raises where the cell certainly reads one that does not exist."""
    names = analyse(cell.code)
    reached = reach(names, namespace, places=places)
    _check(names, reached, namespace, cell)
    if run is None:
        return reached
    own = registry.find_strategy(run.strategy) is None and run.strategy in namespace
    wanted = [run.strategy] if own and run.strategy not in (*reached.hard, *reached.soft) else []
    used = [*(namespace[name] for name in wanted), *_functions(run.options.values())]
    if used:
        more = reach(CellNames(), namespace, values=used, places=places)
        hard = dict.fromkeys((*reached.hard, *wanted, *more.hard))
        reached = replace(reached, hard=tuple(hard), soft=tuple(name for name in reached.soft if name not in hard))
    return reached


def check_shown(code: str, namespace: Mapping[str, Any]) -> None:
    """Refuse `In`, `_i` and the like: on a rank they would be empty. A class of the notebook's may be called `Out`."""
    if not (shown := analyse(code).shown):
        return
    shown = {
        name: line for name, line in shown.items() if name not in namespaces.ALSO_AS or of_ipython(name, namespace)
    }
    if not shown:
        return
    name, line = min(shown.items(), key=lambda item: item[1])
    item = f"{name}[3]" if name in namespaces.LISTS_OF_CELLS else name
    raise UsageError(
        f"{name!r} in line {line} of the cell belongs to IPython in the notebook, and the ranks do not have it: give "
        f"the value a name in an ordinary cell (x = {item}) and read that"
    )


def _functions(options: Iterable[object]) -> Iterator[object]:
    """Functions among the options, and in attributes of objects there: `CustomPolicy(lambda module: ...)`."""
    for value in options:
        if callable(value):
            yield value
        if not isinstance(value, type):
            yield from filter(callable, getattr(value, "__dict__", {}).values())


def _check(names: CellNames, reached: Captured, namespace: dict[str, Any], cell: Cell) -> None:
    if reached.opaque:
        return
    for name, line in sorted(names.certain.items(), key=lambda item: item[1]):
        if name in namespace or name in ON_RANKS or hasattr(builtins, name) or name in reached.writes:
            continue
        close = difflib.get_close_matches(name, [*namespace, *ON_RANKS], 1)
        hint, stop = (f"; did you mean {close[0]!r}?", "") if close else ("", ".")
        message = f"name {name!r} is not defined in the notebook{hint}"
        where = f"Cell In[{cell.number}]" if cell.number is not None else "the cell"
        text = linecache.getline(cell.filename, line).rstrip() or name
        shown = [f"{where}, line {line}", f"----> {line} {text}", f"\nNameError: {message}{stop} Nothing was sent."]
        raise MissingName(message, shown)


def check_kept(keep: Iterable[str], reached: Captured, namespace: dict[str, Any]) -> None:
    """Refuse unknown names in --keep: a typing mistake would bring home what was to stay."""
    for name in keep if not reached.opaque else ():
        if name not in namespace and name not in reached.writes:
            close = difflib.get_close_matches(name, [*reached.writes, *reached.hard], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"--keep {name}: the notebook has no {name!r}, and this cell makes none{hint}")
