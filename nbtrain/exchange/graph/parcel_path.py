"""The way to an object as a person would write it, for objects that exist only as what a parcel says about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from nbtrain.exchange.graph.object_path import step
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Compound, Make, Node, ParcelContent, Ref

Step = tuple[int, str]
"""A key, and what is appended to the holder's address to come to it."""


def path_to(key: int, content: ParcelContent, table: ObjectTable, namespace: dict[str, Any]) -> str:
    """`cfg.tags[3]`, or a sentence when nothing leads there."""
    ahead: deque[Step] = deque()
    for name, value in content.names.items():
        ahead.extend(_refs(value, name))
    for name, value in list(namespace.items()):
        node = table.find(value)
        if node is not None:
            ahead.append((node.key, name))
    records: dict[int, list[tuple[str, Any]]] = {}
    for record in content.records:
        if type(record) is Make:
            records.setdefault(record.key, []).append(("", record.args))
        else:
            node = table.nodes.get(record.key)
            name = node.kind.name if node is not None else _kind_of(record.key, content)
            records.setdefault(record.key, []).append((name, record.state))  # type: ignore[union-attr]
    known: set[int] = set()
    while ahead:
        at, address = ahead.popleft()
        if at == key:
            return address
        if at in known:
            continue
        known.add(at)
        for kind, state in records.get(at, ()):
            ahead.extend(_steps(kind, state, address))
        if at not in records and at in table.nodes:
            ahead.extend(_held(table.nodes[at], address))
    return "an object that no name leads to"


def _kind_of(key: int, content: ParcelContent) -> str:
    return next((r.kind for r in content.records if type(r) is Make and r.key == key), "")


def _held(node: Node, address: str) -> Iterator[Step]:
    for child in node.children:
        yield child.key, address + step(node.obj, child.obj)


def _steps(kind: str, state: Any, address: str) -> Iterator[Step]:
    """What an encoded state leads to."""
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


def _refs(value: Any, address: str) -> Iterator[Step]:
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
