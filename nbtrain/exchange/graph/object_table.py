"""One side's table of the objects that both sides know: key ⇄ object, and what is known about each."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from nbtrain.exchange.kinds.base import Kind, Node
from nbtrain.exchange.kinds.bulk_compare import BulkCompare


class ObjectTable:
    """Keeps its objects alive: `unreachable` finds those that no name leads to any more, `drop` releases them."""

    def __init__(self, first_key: int, step: int = 1) -> None:
        self.nodes: dict[int, Node] = {}
        self.by_id: dict[int, Node] = {}
        self.apart: dict[int, Any] = {}
        """id → the tensor of that id, in pieces (`exchange/kinds/split_tensors.py`)"""
        self.bulk = BulkCompare()
        self.last_key = first_key
        self.step = step

    def new_key(self) -> int:
        self.last_key += self.step
        return self.last_key

    def add(self, key: int, obj: Any, kind: Kind) -> Node:
        node = Node(key, obj, kind)
        self.adopt(node)
        return node

    def adopt(self, node: Node) -> None:
        self.nodes[node.key] = node
        self.by_id[node.kind.identity(node.obj)] = node

    def replace(self, node: Node, obj: Any, kind: Kind) -> None:
        """Let a key mean another object, where the kind cannot be edited in place."""
        self._forget(node)
        node.obj, node.kind, node.fixed, node.memo = obj, kind, None, None
        self.by_id[kind.identity(obj)] = node

    def copied(self) -> ObjectTable:
        """Another table of the same objects, which stays as it is."""
        other = ObjectTable(self.last_key, self.step)
        made = {key: copy.copy(node) for key, node in self.nodes.items()}
        for node in made.values():
            node.children = [made.get(child.key, child) for child in node.children]
            node.fixed = node.fixed and [made.get(child.key, child) for child in node.fixed]
            other.adopt(node)
        return other

    def find(self, obj: Any) -> Node | None:
        node = self.by_id.get(id(obj))
        return node if node is not None and node.obj is obj else None

    def drop(self, keys: Iterable[int]) -> None:
        forms = []
        for key in keys:
            node = self.nodes.pop(key, None)
            if node is not None:
                self._forget(node)
                if node.memo is not None:
                    forms.append(node.memo)
                # Another node may still say that it was met behind this one.
                node.obj = node.seen = node.memo = node.via = node.fixed = None
                node.children = []
        if forms:
            self.bulk.forget(forms)

    def _forget(self, node: Node) -> None:
        identity = node.kind.identity(node.obj)
        if self.by_id.get(identity) is node:  # the object may have come under a second key
            del self.by_id[identity]

    def unreachable(self, roots: Iterable[int]) -> list[int]:
        """Keys of the nodes that none of these leads to."""
        todo = [self.nodes[key] for key in roots if key in self.nodes]
        reached = {node.key for node in todo}
        while todo:
            node = todo.pop()
            for child in (*node.children, *(node.fixed or ())):
                if child.key not in reached:
                    reached.add(child.key)
                    todo.append(child)
        return [key for key in self.nodes if key not in reached]
