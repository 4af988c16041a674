"""Lists what an object holds, by asking its kind, without sending anything."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import dispatch
from nbtrain.exchange.kinds.base import ATOMS, Kind, Later, Node, Sender


class ObjectVisitor(Sender):
    """Looks at one side's objects, whatever their kinds."""

    table: ObjectTable
    kind_of = staticmethod(dispatch.kind_of)

    def __init__(self, table: ObjectTable, namespace: dict[str, Any], *, quiet: bool, keep_home: bool = False) -> None:
        self.table = table
        self.namespace = namespace
        self.quiet = quiet
        self.reads = not quiet
        self.keep_home = keep_home
        self.staying = {}
        self.checksums = {}
        self.arrays = None
        self.children = []

    def buffer(self, data: memoryview | Later, place: Node | None = None) -> int:
        return 0

    def is_new(self, node: Node) -> bool:
        return False

    def known_inside(self, obj: Any) -> list[Node]:
        return KnownInside(self.table, self.namespace).known(obj)


class MemberList(ObjectVisitor):
    """Lists what an object holds, in the order in which a walk meets it."""

    def __init__(self, table: ObjectTable, namespace: dict[str, Any]) -> None:
        super().__init__(table, namespace, quiet=True)
        self.found: list[Any] = []

    def encode(self, value: Any) -> Any:
        if type(value) not in ATOMS:
            kind = self.kind_of(value, self.namespace, self.table.apart)
            if kind is not None and kind.compound:
                for part in kind.parts(value):
                    self.encode(part)
            elif kind is not None:
                self.member(value, kind)
        return None

    def member(self, value: Any, kind: Kind) -> None:
        self.found.append(value)


OBJECTS = 20_000
"""Objects that are looked at inside one that stays on the ranks, the nearest first."""


class KnownInside(MemberList):
    """Goes into an object that only one side has, as far as objects that both sides know."""

    def known(self, root: Any) -> list[Node]:
        self._nodes: dict[int, Node] = {}
        self._seen: dict[int, Any] = {}
        # what has no kind raises below, and stays
        self._ahead: deque[Node] = deque([Node(0, root, self.kind_of(root, self.namespace))])  # type: ignore[arg-type]
        left = OBJECTS
        while self._ahead and left:
            left -= 1
            node = self._ahead.popleft()
            with suppress(Exception):  # whatever its class does when it is looked at, it stays where it is
                node.kind.make_args(node, self)
                if not node.kind.whole:
                    node.kind.look(node, self)
        self._showing()
        return [self._nodes[key] for key in sorted(self._nodes)]

    def _showing(self) -> None:
        """Add the tensors that show memory both sides know: they tell what is written to it."""
        memory = {key for key, node in self._nodes.items() if node.kind.name == "storage"}
        for node in self.table.nodes.values() if memory else ():
            if node.kind.name == "tensor" and any(storage.key in memory for storage in node.fixed or ()):
                self._nodes[node.key] = node

    def member(self, value: Any, kind: Kind) -> None:
        known = self.table.by_id.get(kind.identity(value))
        if known is not None:
            self._nodes[known.key] = known
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            self._ahead.append(Node(0, value, kind))
