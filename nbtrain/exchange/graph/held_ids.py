"""Finds containers that hold `id(p)` of an object that travels: on the ranks it has another one, so that a lookup in
`{id(p): …}` finds nothing there, and the cell goes on with a default."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from nbtrain.exchange.kinds.base import Compound, Node

H = TypeVar("H")

CONTAINERS = (dict, list, set, deque)
SMALLEST = 1 << 32
"""What is below is a number of somebody's: an address is larger."""
MOST = 4096
"""Items of a container that are looked at: who keeps ids has one for each parameter, from the first on."""
INSTEAD = "; instead, "
"""Between a reason and what to write."""
REASON = (
    "it holds id(…) of a {what}, which is another number on the ranks"
    f"{INSTEAD}make it inside the cell, or use the object itself as the key, {{{{p: …}}}}, or its name"
)


def holding_ids(looked: Iterable[Node], by_id: Mapping[int, Node]) -> Iterator[tuple[Node, str]]:
    """Those of these nodes that hold an id of a known object, and the reason to refuse them."""
    for node in looked:
        if isinstance(node.obj, CONTAINERS) or type(node.obj) is tuple:
            for number in islice(node.obj, MOST):
                if type(number) is int and number > SMALLEST and (referent := by_id.get(number)) is not None:
                    yield node, REASON.format(what=type(referent.obj).__name__)
                    break


def holding_ids_inside(encoded: Iterable[tuple[H, Any]], by_id: Mapping[int, Node]) -> Iterator[tuple[H, str]]:
    """The same for tuples and frozensets, which have no nodes: of holders, each with what is sent of it."""
    for holder, state in encoded:
        left, todo = MOST, [state]
        while todo and left:
            value, left = todo.pop(), left - 1
            if type(value) is Compound:
                numbers = [part for part in value.parts if type(part) is int and part > SMALLEST and part in by_id]
                if numbers:
                    yield holder, REASON.format(what=type(by_id[numbers[0]].obj).__name__)
                    break
                todo += value.parts[:left]
            elif type(value) is tuple or type(value) is list:
                todo += value[:left]
            elif type(value) is dict:
                todo += islice(value.values(), left)
