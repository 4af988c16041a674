"""Finds the handles that the notebook still holds for objects that live on the ranks only.

The object lives for as long as anything in the notebook holds its handle: a name, a list, an attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from nbtrain.exchange.graph.object_path import steps_to
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Handle, Node
from nbtrain.exchange.names.cell_names import own


def live_handles(table: ObjectTable, worth: bool = False) -> list[Node]:
    """Handles whose ranks live. `worth`: only those of objects that could travel, which must not be dropped unasked."""
    return [
        node
        for node in list(table.nodes.values())  # a clock in another thread asks too
        if type(node.obj) is Handle and node.obj.fetch is not None and (node.obj.kept or not worth)
    ]


def held(node: Node) -> bool:
    """Whether anybody but the exchange holds this handle."""
    return sys.getrefcount(node.obj) > ALONE


def kept(table: ObjectTable, namespace: Mapping[str, Any]) -> dict[str, int]:
    """How the notebook reaches each handle: a name, or a path such as `results['big']` → its key."""
    keys: dict[str, int] = {}
    nodes = live_handles(table, worth=True)
    mine = [(name, namespace[name]) for name in own(namespace)] if nodes else []
    for node in nodes:
        names = [name for name, value in mine if value is node.obj]
        keys |= dict.fromkeys(names or _ways(mine, node.obj), node.key)
    return keys


def _ways(mine: list[tuple[str, Any]], handle: Handle) -> list[str]:
    """The shortest path to a handle that has no name of its own."""
    ways = []
    for name, value in mine:
        shell = type(value).__module__.startswith(("IPython.", "ipykernel."))  # leads to everything
        if not shell and not isinstance(value, (type, FunctionType, MethodType, ModuleType, Handle)):
            segments = steps_to(value, handle, deep=True)
            if segments is not None:
                ways.append((len(segments), name + "".join(map(str, segments))))
    return [min(ways)[1]] if ways else []


def _alone() -> int:
    node = Node(0, Handle("", "", False), None)  # type: ignore[arg-type]  # it is never looked at
    return sys.getrefcount(node.obj)


ALONE = _alone()
