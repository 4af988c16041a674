"""Replaces objects by others wherever they are referenced.

A parameter that is cut into pieces becomes another tensor; `params = list(model.parameters())` of an earlier cell, an
attribute or a closure must show the new one. So everything that references an old one is searched for: lists, dicts
(as value or key), sets, tuples, instances, closures.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Sequence
from types import CellType, FrameType, ModuleType
from typing import Any


def replace_references(pairs: Sequence[tuple[Any, Any]], roots: Iterable[Any] = ()) -> None:
    """`pairs`: (old, new). `roots`: containers that the garbage collector was told to leave alone."""
    ours = {id(pairs), *map(id, pairs)}
    while pairs:
        new = {id(old): fresh for old, fresh in pairs}
        olds = tuple(old for old, _ in pairs)  # of a list Python 3.13 would find a copy
        ours |= {id(olds), id(new), id(new.values())}
        tuples: list[tuple[Any, Any]] = []
        ours.add(id(tuples))
        for holder in [*gc.get_referrers(*olds), *roots]:
            if id(holder) in ours or isinstance(holder, (FrameType, ModuleType)):
                continue
            if isinstance(holder, tuple):
                fresh = tuple.__new__(type(holder), (new.get(id(item), item) for item in holder))
                tuples.append((holder, fresh))
            else:
                _replace(holder, new)
        ours |= set(map(id, tuples))
        pairs = tuples


def _replace(holder: Any, new: dict[int, Any]) -> None:
    if isinstance(holder, dict):
        _replace_in_dict(holder, new)
    elif isinstance(holder, (list, deque)):
        for i, item in enumerate(holder):
            if id(item) in new:
                holder[i] = new[id(item)]
    elif isinstance(holder, set):
        for item in [item for item in holder if id(item) in new]:
            holder.discard(item)
            holder.add(new[id(item)])
    elif isinstance(holder, CellType):
        if id(holder.cell_contents) in new:
            holder.cell_contents = new[id(holder.cell_contents)]
    else:
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is dict:
            _replace_in_dict(attributes, new)


def _replace_in_dict(holder: dict[Any, Any], new: dict[int, Any]) -> None:
    """Replace keys and values, without calling methods that a subclass of dict may have."""
    if any(id(key) in new for key in holder):
        items = [(new.get(id(key), key), value) for key, value in dict.items(holder)]
        dict.clear(holder)
        for key, value in items:
            dict.__setitem__(holder, key, value)
    for key, value in list(dict.items(holder)):
        if id(value) in new:
            dict.__setitem__(holder, key, new[id(value)])
