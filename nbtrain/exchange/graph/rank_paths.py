"""Finds, on each rank, its own object for one that another rank told the notebook about."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Union

from nbtrain.exchange.graph.held_objects import Members
from nbtrain.exchange.graph.object_path import step
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import module_state
from nbtrain.exchange.kinds.base import ATOMS, Node
from nbtrain.exchange.kinds.containers import LONG_TEXT

RankPath = tuple[int | str, bool, int, int]
"""How to come to an object: a key or name, whether among what it is made of, which one, of how many."""

Trail = Union[str, "tuple[Node, Trail]"]
"""A name, or the holder and how it was come to."""


class RankPaths:
    """How to come to objects that the other ranks made for themselves when the lead made its own."""

    def __init__(self, table: ObjectTable, namespace: dict[str, Any]) -> None:
        self.table = table
        self.namespace = namespace
        self._members: dict[tuple[int | str, bool], list[Any]] = {}
        self._places: dict[tuple[int | str, bool, type, str], dict[Any, int]] = {}
        """where each member of a type is, by its identity: a list may hold thousands of new tensors"""

    def to(self, node: Node) -> RankPath | None:
        holder = node.via
        if holder is None:
            return None
        where = holder.key if isinstance(holder, Node) else holder
        for fixed in (False, True):
            places = self._places_of(where, fixed, node)
            if (index := places.get(node.kind.identity(node.obj))) is not None:
                return where, fixed, index, len(self.members(where, fixed))
        return None

    def _places_of(self, where: int | str, fixed: bool, like: Node) -> dict[Any, int]:
        """Where the members of its type stand."""
        kind = like.kind
        which = where, fixed, type(like.obj), kind.name
        if (known := self._places.get(which)) is None:
            known = self._places[which] = {}
            for index, obj in enumerate(self.members(where, fixed)):
                if type(obj) is type(like.obj):
                    known.setdefault(kind.identity(obj), index)
        return known

    def follow(self, way: RankPath) -> Any:
        """The object at the end of it, or None."""
        where, fixed, index, count = way
        members = self.members(where, fixed)
        return members[index] if len(members) == count else None

    def members(self, where: int | str, fixed: bool) -> list[Any]:
        known = self._members.get((where, fixed))
        if known is None:
            walk = Members(self.table, self.namespace)
            if isinstance(where, str):
                value = module_state.named(where) or self.namespace.get(where, module_state.MISSING)
                if value is not module_state.MISSING and not fixed:
                    walk.encode(value)
                    if not by_value(value) and all(one is not value for one in walk.found):
                        walk.found.append(value)  # a tuple, say: it travels as what it holds, but may have to stay
            elif where in self.table.nodes:
                node = self.table.nodes[where]
                seen, node.seen = node.seen, None
                with suppress(Exception):  # what it is may forbid it: a tensor whose memory was given back
                    (node.kind.shell if fixed else node.kind.look)(node, walk)
                node.seen = seen
            known = self._members[where, fixed] = walk.found
        return known


def by_value(value: Any) -> bool:
    """It travels as it is, and nobody asks which one it is."""
    return type(value) in ATOMS and not (type(value) in (str, bytes) and len(value) >= LONG_TEXT)


def find_all(table: ObjectTable, names: Mapping[str, Any], wanted: tuple[type, ...]) -> dict[str, Any]:
    """Every object of these types below some names, by an address a person understands; of a model, not its parts."""
    found: dict[str, Any] = {}
    parts: set[int] = set()
    seen: set[int] = set()
    todo: list[tuple[Node, Trail]] = []
    for name, value in names.items():
        node = table.find(value)
        if node is not None:
            todo.append((node, name))
    todo.reverse()
    while todo:
        node, trail = todo.pop()
        if node.key in seen:
            continue
        seen.add(node.key)
        if isinstance(node.obj, wanted) and id(node.obj) not in parts:
            found[_address(node, trail)] = node.obj
            if hasattr(node.obj, "modules"):
                parts.update(map(id, node.obj.modules()))
        if node.kind.whole:
            continue
        below = [*(node.fixed or ()), *node.children]  # the first: what a function closes over
        todo.extend((child, (node, trail)) for child in reversed(below))
    return found


def _address(node: Node, trail: Trail) -> str:
    """Put together for what was found only: to look for each object's place in its holder would take longest of all."""
    address = ""
    while not isinstance(trail, str):
        holder, trail = trail
        address, node = step(holder.obj, node.obj) + address, holder
    return trail + address
