"""What kinds see of whoever asks them what an object holds; and those who only ask, and send nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any

from nbtrain.exchange import kinds
from nbtrain.exchange.graph.cargo import Stay
from nbtrain.exchange.graph.table import Node, Table
from nbtrain.exchange.kinds.base import ATOMS, Kind, Later


class Visit(ABC):
    """A kind calls `encode` for each object that its own leads to, in an order that is always the same."""

    def __init__(self, table: Table, namespace: dict[str, Any], *, quiet: bool, keep_home: bool = False) -> None:
        self.table = table
        self.namespace = namespace
        self.quiet = quiet
        """only how things are is asked: nothing is sent, no key is given"""
        self.keep_home = keep_home
        """coming home: what cannot travel stays where it is, behind a handle"""
        self.staying: dict[int, Stay] = {}
        """coming home: id of a new object → why it is to stay behind a handle"""
        self.arrays: Any = None
        """where the arrays lie that a tensor may have been made of, once one asked"""
        self.children: list[Node] = []
        """nodes met while one object is looked at"""

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """How the holder's state names it."""

    def buffer(self, data: memoryview | Later, place: Node | None = None) -> int:
        """Bytes that go beside the pickle; returns where the other side finds them."""
        return 0

    def is_new(self, node: Node) -> bool:
        """Whether the other side gets it, with its bytes, from this visit."""
        return False

    def known_inside(self, obj: Any) -> list[Node]:
        """The first objects on every way into this one that the other side knows."""
        return Inside(self.table, self.namespace).known(obj)


class Members(Visit):
    """Lists what an object holds, in the order in which a walk meets it."""

    def __init__(self, table: Table, namespace: dict[str, Any]) -> None:
        super().__init__(table, namespace, quiet=True)
        self.found: list[Any] = []

    def encode(self, value: Any) -> Any:
        if type(value) not in ATOMS:
            kind = kinds.kind_of(value, self.namespace, self.table.apart)
            if kind is not None and kind.compound:
                for part in kind.parts(value):
                    self.encode(part)
            elif kind is not None:
                self.member(value, kind)
        return None

    def member(self, value: Any, kind: Kind) -> None:
        self.found.append(value)


OBJECTS = 20_000
"""so many are looked at inside one that stays, the nearest first"""


class Inside(Members):
    """Goes into an object that only one side has."""

    def known(self, root: Any) -> list[Node]:
        self._nodes: dict[int, Node] = {}
        self._seen: dict[int, Any] = {}
        self._ahead: deque[Node] = deque([Node(0, root, kinds.kind_of(root, self.namespace))])  # type: ignore[arg-type]
        left = OBJECTS
        while self._ahead and left:
            left -= 1
            node = self._ahead.popleft()
            with suppress(Exception):  # whatever its class does when it is looked at, it stays where it is
                node.kind.shell(node, self)
                if not node.kind.whole:
                    node.kind.look(node, self)
        self._showing()
        return [self._nodes[key] for key in sorted(self._nodes)]

    def _showing(self) -> None:
        """What is written to memory that both sides know is told by the tensors that show it."""
        memory = {key for key, node in self._nodes.items() if node.kind.name == "storage"}
        for node in self.table.nodes.values() if memory else ():
            if node.kind.name == "tensor" and any(held.key in memory for held in node.fixed or ()):
                self._nodes[node.key] = node

    def member(self, value: Any, kind: Kind) -> None:
        known = self.table.by_id.get(kind.identity(value))
        if known is not None:
            self._nodes[known.key] = known
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            self._ahead.append(Node(0, value, kind))
