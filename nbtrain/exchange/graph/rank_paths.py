"""Finds a rank's own object for one that the lead rank made, by the way to it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from nbtrain.exchange.graph.held_objects import MemberList
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import python_module_state
from nbtrain.exchange.kinds.base import ATOMS, MISSING, Node
from nbtrain.exchange.kinds.containers import LONG_TEXT

RankPath = tuple[int | str, bool, int, int]
"""The way to an object: key or name of its holder, whether the holder is made of it, which one, of how many."""


class RankPaths:
    """Ways to new objects, written by the lead and followed by the other ranks, which made their own."""

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
        """Which member of the holder each object of this type is."""
        kind = like.kind
        which = where, fixed, type(like.obj), kind.name
        if (known := self._places.get(which)) is None:
            known = self._places[which] = {}
            for index, obj in enumerate(self.members(where, fixed)):
                if type(obj) is type(like.obj):
                    known.setdefault(kind.identity(obj), index)
        return known

    def follow(self, way: RankPath) -> Any:
        """The object at the end of a way, or None."""
        where, fixed, index, count = way
        members = self.members(where, fixed)
        return members[index] if len(members) == count else None

    def members(self, where: int | str, fixed: bool) -> list[Any]:
        known = self._members.get((where, fixed))
        if known is None:
            walk = MemberList(self.table, self.namespace)
            if isinstance(where, str):
                value = python_module_state.named(where) or self.namespace.get(where, MISSING)
                if value is not MISSING and not fixed:
                    walk.encode(value)
                    if not by_value(value) and all(other is not value for other in walk.found):
                        walk.found.append(value)  # a tuple, say: it travels as what it holds, but may have to stay
            elif where in self.table.nodes:
                node = self.table.nodes[where]
                seen, node.seen = node.seen, None
                with suppress(Exception):  # what it is may forbid it: a tensor whose memory was given back
                    (node.kind.make_args if fixed else node.kind.look)(node, walk)
                node.seen = seen
            known = self._members[where, fixed] = walk.found
        return known


def by_value(value: Any) -> bool:
    """Whether an object travels as it is, and nobody asks which one it is."""
    return type(value) in ATOMS and not (type(value) in (str, bytes) and len(value) >= LONG_TEXT)
