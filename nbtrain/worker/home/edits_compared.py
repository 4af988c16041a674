"""A number for each known object that a cell has edited on this rank, by which the notebook sees what was edited on
some ranks only, or otherwise than on the lead.

Every rank looks at what the cell reached as the lead does, whose edits come home. What differs is said, and all ranks
get the lead's again. Weights and buffers are left to `worker/ranks/replica_checksums.py`, which knows what a strategy
keeps equal; what a rank has of its own (loaders, random states, objects of libraries, which count and take times) is
not compared.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from types import ModuleType
from typing import Any

from nbtrain.compat import tensors
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import gradient_hooks
from nbtrain.exchange.kinds.base import ATOMS, Compound, Node, Ref
from nbtrain.exchange.local_files import local
from nbtrain.worker.home import rank_differences

LEARNING = frozenset(("module", "optimizer", "scheduler"))
PLAIN = frozenset(("list", "deque", "set", "dict", "Counter", "defaultdict", "bytearray", "object array"))
CODE = frozenset(("function", "cell", "class", "partial", "module state"))
INSTANCES = frozenset(("instance", "stateful", *(f"{of} with attributes" for of in ("list", "deque", "set", "dict"))))
TENSORS = frozenset(("tensor", "apart", "array"))
HOLDERS = (list, tuple, dict, set, frozenset, bytes)
DEEP = 4
"""Levels of what was seen of one object: a module's tables have three"""
COMPARED = LEARNING | PLAIN | CODE | INSTANCES | TENSORS


def numbers(walk: Walk, weights: Callable[[], Container[int]]) -> list[tuple[int, int]]:
    """(key, number) of what the walk found edited. `weights`: ids of tensors whose bytes are compared elsewhere."""
    new = {node.key for node in walk.added}
    elsewhere = weights() if any(node.kind.name == "tensor" for node, _, _ in walk.edits) else ()
    sums: Counter[int] = Counter()
    for node, before, state in walk.edits:
        kind, seen = node.kind.name, node.seen
        if node.key in new:
            continue
        if kind in ("apart", "tensor") and any(seen[4]):
            seen = (*seen[:4], tuple(_hooks(node.obj, name, new, walk.table) for name in gradient_hooks.TABLES))
        if kind == "apart" or (kind == "tensor" and id(node.obj) in elsewhere and before is not None):
            # whole until now, or only its bytes are others
            if before is None or (seen[:3], seen[4:]) == (before[:3], before[4:]):
                continue
            seen = (seen[:3], seen[4:])
        holder = _compared_with(node)
        if holder is not None and kind in TENSORS:
            sums[holder.key] += zlib.crc32(repr((node.key, seen)).encode())
        elif holder is not None and not _alike(before, seen):
            inside = holder.kind.name in LEARNING or kind in LEARNING  # what trains is compared elsewhere
            sums[node.key] += _number(node, state, new, None if inside else walk.table)
    return list(sums.items())


def _hooks(tensor: Any, name: str, new: Container[int], table: ObjectTable) -> tuple[int, ...]:
    """Those on its gradient: keys of known ones, and numbers of those that the other side does not know yet."""
    found = ((hook, table.find(hook)) for _, hook in tensors.users_hooks(tensor, name))
    return tuple(
        rank_differences.number(hook, table) if node is None or node.key in new else node.key for hook, node in found
    )


def _compared_with(node: Node) -> Node | None:
    """The optimizer that a tensor is a state of, as there are hundreds of those, which are compared as a whole; else
    the node itself. None: something that leads to it is not the user's own, and does not learn."""
    at: Any = node
    compared = node
    passed = set()
    while isinstance(at, Node) and at.key not in passed:
        passed.add(at.key)
        kind = at.kind.name
        if kind not in COMPARED or (kind in INSTANCES and not _by_user(type(at.obj))):
            return None
        if kind == "optimizer":
            compared = at
        at = at.via
    return compared


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
    """Pickles an encoded state. An object that the other side does not know yet has no key, or one of this rank's."""

    new: Container[int]

    def persistent_id(self, obj: Any) -> Any:
        cls = type(obj)
        if obj is None or (cls is Ref and obj.key in self.new):
            return 0
        if cls is Ref:
            return obj.key
        if cls is Compound:
            return obj.kind, obj.parts
        plain = cls in HOLDERS or (cls in ATOMS and cls not in (ModuleType, type))
        return None if plain else cls.__name__


def _number(node: Node, state: Any, new: Container[int], table: ObjectTable | None) -> int:
    """`table`: by which objects are told that the other side does not know, whose contents count."""
    unknown: list[int] = []
    if table is not None and type(state) is not bytes:  # plain values are in the state whole
        unknown += [rank_differences.number(obj, table) for obj in _members(node.seen) if _is_new(obj, new, table)]
    if node.kind.name == "set":  # in whichever order
        packed = len(node.obj) if type(state) is bytes else sum(_packed(value, new) for value in state)
        return packed + sum(unknown)
    return zlib.crc32(repr((_packed(state, new), unknown)).encode())


def _members(seen: Any, depth: int = DEEP) -> Iterator[Any]:
    """The objects that were seen in one."""
    if hasattr(seen, "boxes"):
        for _, _, values in seen.boxes:
            yield from values
        yield from seen.values
    elif type(seen) in (list, tuple, dict, set) and depth:
        for member in [*seen, *seen.values()] if type(seen) is dict else seen:
            if type(member) in (list, tuple):
                yield from _members(member, depth - 1)
            yield member


def _is_new(obj: Any, new: Container[int], table: ObjectTable) -> bool:
    if type(obj) in ATOMS or type(obj) in (tuple, type(None)):
        return False
    node = table.find(obj)
    return node is None or node.key in new


def _packed(state: Any, new: Container[int]) -> int:
    file = io.BytesIO()
    pickler = _Numbered(file, 5)
    pickler.fast, pickler.new = True, new  # two equal strings may be one object on some ranks
    try:
        pickler.dump(state)
    except Exception:  # nested too deeply, say
        return 0
    return zlib.crc32(file.getbuffer())
