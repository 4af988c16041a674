"""Writes the path to an object that could not be made, of which there is only what a parcel says about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from nbtrain.exchange.graph.object_path import path_suffix
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Compound, MakeTwin, ParcelContent, Ref

Reached = tuple[int, str]
"""A key, and how its object is reached."""


def path_to(key: int, content: ParcelContent, table: ObjectTable, namespace: dict[str, Any]) -> str:
    """The path to a key, as in `cfg.tags[3]`; a sentence where no name leads there."""
    ahead = deque(ref for name, value in content.names.items() for ref in _refs(value, name))
    ahead.extend((node.key, name) for name, value in list(namespace.items()) if (node := table.find(value)) is not None)
    kinds = {record.key: record.kind for record in content.records if isinstance(record, MakeTwin)}
    kinds |= {node.key: node.kind.name for node in table.nodes.values()}
    states: dict[int, list[tuple[str, Any]]] = {}
    for record in content.records:
        state = ("", record.args) if isinstance(record, MakeTwin) else (kinds.get(record.key, ""), record.state)
        states.setdefault(record.key, []).append(state)
    known: set[int] = set()
    while ahead:
        at, address = ahead.popleft()
        if at == key:
            return address
        if at in known:
            continue
        known.add(at)
        for kind, state in states.get(at, ()):
            ahead.extend(_steps(kind, state, address))
        if at not in states and at in table.nodes:
            node = table.nodes[at]
            ahead.extend((child.key, address + path_suffix(node.obj, child.obj)) for child in node.children)
    return "an object that no name leads to"


def _steps(kind: str, state: Any, address: str) -> Iterator[Reached]:
    """The keys that an encoded state leads to, with their paths."""
    if kind == "defaultdict":
        factory, state = state
        yield from _refs(factory, f"{address}.default_factory")
    if isinstance(state, (list, tuple)) and [type(part) for part in state] == [list, list]:
        first, second = state
        if kind == "module":
            for name, value in (*first, *(item for box in second for item in box)):
                yield from _refs(value, f"{address}[{name}]" if name.isdigit() else f"{address}.{name}")
            return
        if len(first) == len(second):
            plain = all(type(name) is str for name in first)
            for name, value in zip(first, second, strict=True):
                attribute = plain and kind not in ("dict", "OrderedDict", "Counter", "defaultdict")
                yield from _refs(value, f"{address}.{name}" if attribute else f"{address}[{name!r}]")
                yield from _refs(name, f"{address} (a key)")
            return
    if kind in ("list", "deque") and isinstance(state, list):
        for index, value in enumerate(state):
            yield from _refs(value, f"{address}[{index}]")
        return
    yield from _refs(state, address)


def _refs(value: Any, address: str) -> Iterator[Reached]:
    if type(value) is Ref:
        yield value.key, address
    elif type(value) is Compound:
        for index, part in enumerate(value.parts):
            yield from _refs(part, f"{address}[{index}]" if value.kind == "tuple" else address)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _refs(part, address)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _refs(part, address)
