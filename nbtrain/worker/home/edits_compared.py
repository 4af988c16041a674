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
        kind, seen = node.kind.name, node.seen
        if node.key in new:
            continue
        if kind == "apart" or (kind == "tensor" and id(node.obj) in elsewhere and before is not None):
            # whole until now, or only its bytes are others
            if before is None or (seen[:3], seen[4:]) == (before[:3], before[4:]):
                continue
            seen = (seen[:3], seen[4:])
        holder = _compared_with(node)
        if holder is not None and kind in TENSORS:
            found[holder.key] += zlib.crc32(repr((node.key, seen)).encode())
        elif holder is not None and not _alike(before, seen):
            found[node.key] += _number(node, state, new)
    return list(found.items())


def _compared_with(node: Node) -> Node | None:
    """The optimizer that a tensor is a state of, as there are hundreds of those, which are compared as a whole; else
    the node itself. None: something that leads to it is not the user's own, and does not learn."""
    at: Any = node
    found = node
    passed = set()
    while isinstance(at, Node) and at.key not in passed:
        passed.add(at.key)
        kind = at.kind.name
        if kind not in COMPARED or (kind in INSTANCES and not _by_user(type(at.obj))):
            return None
        if kind == "optimizer":
            found = at
        at = at.via
    return found


def _by_user(cls: type) -> bool:
    return cls.__module__ == "__main__" or local(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


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
