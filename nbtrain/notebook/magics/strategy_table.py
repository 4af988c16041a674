"""`%distributed strategies`: what each strategy and preset is, whether it can be used here, what a failure costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtrain.base import tables
from nbtrain.base.errors import UsageError
from nbtrain.base.tables import Row
from nbtrain.compat import strategy_packages
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.line.strategy_flags import by_field
from nbtrain.notebook.magics.own_strategies import checked, of_notebook, says
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.strategies import presets

STRATEGIES: Row = ("strategy", "shards", "available", "after a failure", "options")
PRESETS: Row = ("preset", "stands for", "available")
OWN: Row = ("of this notebook", "what it says of itself", "available", "options")


def strategies() -> list[Row]:
    return [_strategy(entry) for entry in registry.strategies().values()]


def with_presets() -> list[Row]:
    rows: list[Row] = []
    for name in presets.names():
        preset = presets.PRESETS[name]
        rows.append((name, preset.line, _available(registry.strategy(preset.strategy))))
    return rows


def with_own(notebook: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for name, value in of_notebook(notebook).items():
        available, options = _checked(value, name)
        rows.append((name, says(value), available, options))
    return rows


def blocks(notebook: Mapping[str, Any]) -> list[tables.Block]:
    every: list[tuple[Row, list[Row]]] = [
        (STRATEGIES, strategies()),
        (PRESETS, with_presets()),
        (OWN, with_own(notebook)),
    ]
    return [(head, rows) for head, rows in every if rows]


def _strategy(entry: registry.Entry) -> Row:
    available = _available(entry)
    after_failure = (
        "kept, if all ranks stand at the same step" if entry.in_pieces else "the last step of any rank is kept"
    )
    options = ""
    if available == "yes" and not entry.package:
        options = _options(entry.load())
    elif available == "yes":
        try:
            available, options = _checked(entry.load(), entry.where)
        except UsageError as error:
            available = f"no: {error}"
    if entry.unrun:
        available = f"{available}; {entry.unrun}"
    return entry.name, entry.shards, available, after_failure, options


def _checked(value: Any, where: str) -> tuple[str, str]:
    """(available, options) of a strategy that is not nbtrain's."""
    try:
        return "yes", _options(checked(value, where))
    except UsageError as error:
        return f"no: {error}", ""


def _available(entry: registry.Entry) -> str:
    """`yes`, or why not, and the command that changes it."""
    reason = registry.lacking(entry.needs) or strategy_packages.refusal(
        entry.name, entry.internals, entry.instead, look=False
    )
    return f"no: {reason}" if reason else "yes"


def _options(cls: type) -> str:
    return " ".join(flag.flag for flag in by_field(cls).values())


def show(state: MagicsState, request: Request) -> None:
    found = blocks(state.notebook)
    state.shell.display_pub.publish({"text/plain": tables.blocks_text(found), "text/html": tables.page(found)})
