"""What nobody can change and is too long to be sent with every cell: long strings, bytes and tuples of such values.

They are nodes, known by their identity: the ranks get each of them once, and nobody compares it ever again.
"""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

from nbtrain.exchange.kinds.base import ATOMS, Kind, Node, Receiver, Sender

TEXT = 1 << 14
"""Characters or bytes from which a string is one."""
ITEMS = 256
"""The same for tuples."""


class LongConstant(Kind):
    name = "frozen"
    whole = constant = True

    def shell(self, node: Node, walk: Sender) -> Any:
        if walk.quiet:
            return None
        obj = node.obj
        if type(obj) is bytes:
            return "bytes", walk.buffer(memoryview(obj))
        return "other", walk.buffer(memoryview(pickle.dumps(obj, 5)))

    def make(self, args: Any, receiver: Receiver) -> Any:
        form, where = args
        data = receiver.buffer(where)
        return bytes(data) if form == "bytes" else pickle.loads(data)

    def look(self, node: Node, walk: Sender) -> Any:
        return None


FROZEN = LongConstant()


def is_long(value: tuple[Any, ...]) -> bool:
    """Whether it is a tuple for this kind: long, and of nothing but atoms and tuples of them."""
    return len(value) >= ITEMS and _plain(value)


def _plain(value: tuple[Any, ...]) -> bool:
    return all(
        (type(part) in ATOMS and type(part) is not ModuleType) or (type(part) is tuple and _plain(part))
        for part in value
    )
