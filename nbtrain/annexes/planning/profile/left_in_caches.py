"""Removes the fake tensors that a profiled forward has stored outside of the model.

A mask that is stored in a global dict, or behind `lru_cache`, would otherwise be used by the next real forward. Taken
out again is what lies in containers, caches, closures, modules and classes; of anything else a sentence says what to
do.
"""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import CellType, FrameType
from typing import Any

from nbtrain.annexes.planning.profile.lend_model import attributes
from nbtrain.compat import python
from nbtrain.compat.fake_tensors import FakeTensor

DEEP = 6
"""levels of tuples in tuples"""
REMOVED = "tensors that the forward stored outside of the model were removed again"
REMAINS = (
    "the forward stored tensors of the plan where they cannot be removed: make the model again if its next call fails"
)


class FakeTensorCleanup:
    """A context around one trace, which removes the fake tensors that outlive it."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._watched: Sequence[Callable[[], Any]] = ()
        self._said: tuple[str, ...] = ()

    def watch(self, made: Sequence[Callable[[], Any]]) -> None:
        """Takes weak references to what must be gone at the end. If all is gone, nothing is searched."""
        self._watched = made

    def notes(self) -> tuple[str, ...]:
        return self._said

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is not None:
            _clear_frames(error)
        if error is None and all(one() is None for one in self._watched):
            return
        removed = bool(left := self._remaining()) and _remove(left)
        del left
        self._said = (*([REMOVED] if removed else []), *([REMAINS] if self._remaining() else []))

    def _remaining(self) -> list[Any]:
        gc.collect()
        fakes = (one for one in gc.get_objects() if issubclass(type(one), FakeTensor))
        return [one for one in fakes if one.fake_mode is self._mode]


def _remove(targets: list[Any]) -> bool:
    """Remove these from all containers; of tuples, which cannot be changed, remove the tuple itself. True: something
    was removed that is in use still."""
    removed = False
    for _ in range(DEEP):
        ids, asked = {id(one) for one in targets}, tuple(targets)  # of a list Python 3.13 reports a copy
        above = []
        for holder in gc.get_referrers(*asked):
            if holder is targets or holder is asked or isinstance(holder, FrameType):
                continue
            if isinstance(holder, tuple | frozenset):
                above.append(holder)
            else:
                removed = _take_out(holder, ids) or removed
        if not above:
            break
        targets = above
    return removed


def _take_out(holder: Any, ids: set[int]) -> bool:
    if isinstance(holder, python.LruCache):
        holder.cache_clear()
    elif isinstance(holder, CellType):
        holder.cell_contents = None
    elif isinstance(holder, dict):
        owners = (one for one in gc.get_referrers(holder) if isinstance(one, type) or attributes(one) is holder)
        owner = next(owners, None)
        for key in [key for key, value in holder.items() if id(value) in ids or id(key) in ids]:
            if owner is None:
                dict.pop(holder, key)
            elif isinstance(owner, type):
                type.__setattr__(owner, key, None)
            else:
                holder[key] = None
    elif isinstance(holder, list | deque | set):
        kept = [one for one in holder if id(one) not in ids]
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(kept)
    else:
        return False
    return True


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes, which hold the tensors that it happened with."""
    told: BaseException | None = error
    seen: set[int] = set()
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        traceback.clear_frames(told.__traceback__)
        told = told.__cause__ or told.__context__
