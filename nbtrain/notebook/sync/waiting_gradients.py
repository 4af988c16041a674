"""Knows which of the notebook's tensors have a gradient on the ranks, and which had one on ranks that have begun anew.

Gradients do not come home. What is lost here is named to the next cell, and a step that misses it says so
(`worker/gradients/gradients_between_cells.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from nbtrain.exchange.graph.object_table import ObjectTable


class WaitingGradients:
    def __init__(self) -> None:
        self.there: set[int] = set()
        """keys of tensors that have one on the ranks"""
        self._lost: list[ref[Any]] = []
        """weakly: a model may be made anew"""

    def lost_keys(self, table: ObjectTable) -> tuple[int, ...]:
        """Keys of the tensors whose gradients were lost, as far as they are in this table."""
        nodes = [table.find(tensor) for reference in self._lost if (tensor := reference()) is not None]
        return tuple([node.key for node in nodes if node is not None])

    def came_home(self, table: ObjectTable, there: set[int], lost: Iterable[int]) -> None:
        """After a cell: those that wait now, and those of `lost_keys` that nothing has settled."""
        self.there = there
        if self._lost:
            still = set(lost)
            nodes = [(reference, table.find(tensor)) for reference in self._lost if (tensor := reference()) is not None]
            self._lost = [reference for reference, node in nodes if node is None or node.key in still]

    def lose(self, table: ObjectTable, spared: Iterable[int] = ()) -> None:
        """The ranks begin anew. `spared`: keys of tensors that keep theirs."""
        tensors = [table.nodes[key].obj for key in self.there.difference(spared) if key in table.nodes]
        self._lost += [ref(tensor) for tensor in tensors if tensor is not None]
        self.there.intersection_update(spared)
