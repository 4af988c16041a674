"""After a module was loaded again: what a rank holds of the old text becomes the new, as if it had just arrived.

Instances get the new class, the notebook's classes below an old one get the new one as their base, and names, lists,
dicts, attributes and closures that hold an old function, class or enum member hold the new one. What Python does not
allow (other slots, a base with another layout) stays as it was.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import CellType, FunctionType, ModuleType
from typing import Any

Pair = tuple[Any, Any]


def pairs(module: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Pair]:
    """Pairs (old, new) of what this module itself defines."""
    found: list[Pair] = []
    for name, old in before.items():
        new = after.get(name)
        if getattr(old, "__module__", None) == module and old is not new:
            found += _of(old, new)
    return found


def _of(old: Any, new: Any) -> Iterator[Pair]:
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        if old.__qualname__ == new.__qualname__:
            yield old, new
    elif isinstance(old, type) and isinstance(new, type) and old.__qualname__ == new.__qualname__:
        yield old, new
        if issubclass(old, enum.Enum) and issubclass(new, enum.Enum):
            yield from ((old[name], new[name]) for name in old.__members__ if name in new.__members__)
            return
        for name, held in list(vars(old).items()):
            if isinstance(held, type) and held.__module__ == old.__module__ and name in vars(new):
                yield from _of(held, vars(new)[name])


def renew(replaced: Iterable[Pair], namespace: dict[str, Any]) -> None:
    """Replace old objects by new ones wherever the garbage collector finds a reference, and in `namespace`.

    Objects made before the rank was forked are not searched: they refer to no local module."""
    swap = {id(old): (old, new) for old, new in replaced}
    if not swap:
        return
    olds = tuple(old for old, _ in swap.values())  # as such it is passed on; of a list Python 3.13 shows a copy
    ours = {id(olds), id(swap), *map(id, swap.values())}
    _in_table(namespace, swap)
    for holder in gc.get_referrers(*olds):
        if id(holder) not in ours:
            _in_holder(holder, swap)
    for old, new in list(swap.values()):
        if isinstance(old, type) and not issubclass(old, enum.Enum):
            _rebase(old, swap)
            for instance in gc.get_referrers(old):
                if type(instance) is old:
                    with suppress(TypeError):
                        object.__setattr__(instance, "__class__", new)


def _rebase(old: type, swap: Mapping[int, Pair]) -> None:
    subclasses: list[type] = type.__subclasses__(old)
    for below in subclasses:
        if id(below) not in swap:
            with suppress(TypeError):
                below.__bases__ = tuple(swap[id(base)][1] if id(base) in swap else base for base in below.__bases__)


def _in_holder(holder: Any, swap: Mapping[int, Pair]) -> None:
    if type(holder) is dict:
        if not ("__module__" in holder and "__doc__" in holder):  # a class's own: Python keeps notes of what is in it
            _in_table(holder, swap)
    elif isinstance(holder, list):
        for index, value in enumerate(holder):
            if id(value) in swap:
                holder[index] = swap[id(value)][1]
    elif isinstance(holder, dict):
        _in_table(holder, swap)
    elif isinstance(holder, CellType):
        holder.cell_contents = swap[id(holder.cell_contents)][1]
    elif not isinstance(holder, (type, ModuleType, FunctionType)) and isinstance(
        attributes := getattr(holder, "__dict__", None), dict
    ):
        _in_table(attributes, swap)


def _in_table(table: dict[Any, Any], swap: Mapping[int, Pair]) -> None:
    for key, value in list(table.items()):
        if id(value) in swap:
            table[key] = swap[id(value)][1]
