"""A number for each known object that a cell has edited on this rank, by which the notebook sees what was edited on
some ranks only, or otherwise than on the lead.

Every rank looks at what the cell reached as the lead does, whose edits come home. What differs is said, and all ranks
get the lead's again. Weights and buffers are left to `training/ranks/replica_checksums.py`, which knows what a strategy
keeps equal; what a rank has of its own (loaders, random states, objects of libraries, which count and take times) is
not compared.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Container
from types import ModuleType
from typing import Any

from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.kinds.base import ATOMS, Compound, Node, Ref
from nbtrain.local_files import local

LEARNING = frozenset(("module", "optimizer", "scheduler"))
PLAIN = frozenset(("list", "deque", "set", "dict", "Counter", "defaultdict", "bytearray", "object array"))
CODE = frozenset(("function", "cell", "class", "partial", "module state"))
INSTANCES = frozenset(("instance", "stateful", *(f"{of} with attributes" for of in ("list", "deque", "set", "dict"))))
TENSORS = frozenset(("tensor", "apart", "array"))
DEEP = 4
"""Levels of what was seen of one object: a module's tables have three"""
COMPARED = LEARNING | PLAIN | CODE | INSTANCES | TENSORS


def numbers(walk: Walk, weights: Callable[[], Container[int]]) -> list[tuple[int, int]]:
    """(key, number) of what the walk found edited. `weights`: ids of tensors whose bytes are compared elsewhere."""
    new = {node.key for node in walk.added}
    elsewhere = weights() if any(node.kind.name == "tensor" for node, _, _ in walk.edits) else ()
    found: Counter[int] = Counter()
    for node, before, state in walk.edits:
        if node.key in new or node.kind.name not in COMPARED or not _compared(node):
            continue
        if node.kind.name in TENSORS:
            seen = node.seen
            if before is None and node.kind.name == "apart":  # whole until now, or new
                continue
            if before is not None and (node.kind.name == "apart" or id(node.obj) in elsewhere):
                if (seen[:3], seen[4:]) == (before[:3], before[4:]):
                    continue
                seen = (seen[:3], seen[4:])
            # Of states there are hundreds, which are compared as a whole.
            key = node.key if (holder := _optimizer_above(node)) is None else holder.key
            found[key] += zlib.crc32(repr((node.key, seen)).encode())
        elif not _alike(before, node.seen):
            found[node.key] += _number(node, state, new)
    return list(found.items())


def _compared(node: Node) -> bool:
    """Whether all that leads to it is the user's own, or learns."""
    at: Any = node
    passed = set()
    while isinstance(at, Node) and at.key not in passed:
        passed.add(at.key)
        if at.kind.name not in COMPARED or (at.kind.name in INSTANCES and not _by_user(type(at.obj))):
            return False
        at = at.via
    return True


def _by_user(cls: type) -> bool:
    return cls.__module__ == "__main__" or local(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _optimizer_above(node: Node) -> Node | None:
    at: Any = node.via
    for _ in range(4):  # the optimizer, its dict, that of its states, that of one parameter
        if not isinstance(at, Node):
            return None
        if at.kind.name == "optimizer":
            return at
        at = at.via
    return None


def _alike(before: Any, now: Any, depth: int = 0) -> bool:
    """Whether what was seen is made of the same objects, or of equal ones that nobody can change."""
    if before is now:
        return True
    if type(before) is not type(now) or depth > DEEP:
        return False
    if type(now) in (list, tuple):
        return len(before) == len(now) and all(_alike(*pair, depth + 1) for pair in zip(before, now, strict=True))
    if hasattr(now, "boxes"):  # what was seen of a module
        return all(_alike(getattr(before, name), getattr(now, name)) for name in ("keys", "values", "boxes", "hooked"))
    return type(now) in ATOMS and bool(before == now or (before != before and now != now))


class _Numbered(pickle.Pickler):
    """Pickles an encoded state. An object that the other side does not know yet is another one on each rank."""

    new: Container[int]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Ref:
            return int, (0 if obj.key in self.new else obj.key,)
        if type(obj) is Compound:
            return tuple, ((obj.kind, obj.parts),)
        plain = type(obj) in ATOMS and type(obj) is not ModuleType
        return NotImplemented if plain else (str, (type(obj).__name__,))


def _number(node: Node, state: Any, new: Container[int]) -> int:
    if node.kind.name == "set":  # in whichever order
        return len(node.obj) if type(state) is bytes else sum(_packed(value, new) for value in state)
    return _packed(state, new)


def _packed(state: Any, new: Container[int]) -> int:
    file = io.BytesIO()
    pickler = _Numbered(file, 5)
    pickler.fast, pickler.new = True, new  # two equal strings may be one object on some ranks
    try:
        pickler.dump(state)
    except Exception:  # nested too deeply, say
        return 0
    return zlib.crc32(file.getbuffer())
