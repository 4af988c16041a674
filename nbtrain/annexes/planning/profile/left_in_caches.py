"""Removes the fake tensors that a profiled forward has stored outside of the model.

A mask that is stored in a global dict, or behind `lru_cache`, would otherwise be used by the next real forward.
"""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from nbtrain.annexes.planning.profile.lend_model import attributes
from nbtrain.compat import python
from nbtrain.compat.fake_tensors import FakeTensor

ROUNDS = 5
DEEP = 6
"""levels of tuples in tuples"""
REMOVED = "tensors that the forward stored outside of the model were removed again"
REMAINS = (
    "the forward stored tensors of the plan where they cannot be removed: make the model again if its next call fails"
)


class FakeTensorCleanup:
    """A context around one trace: knows which objects are new, and removes fake tensors that outlive it."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._frozen = False
        self._new: set[int] = set()
        self._watched: Sequence[Callable[[], Any]] = ()
        self._removed = False
        self._remains = False

    def watch(self, made: Sequence[Callable[[], Any]]) -> None:
        """Takes weak references to what must be gone at the end. If all is gone, nothing is searched."""
        self._watched = made

    def notes(self) -> tuple[str, ...]:
        return (*([REMOVED] if self._removed else []), *([REMAINS] if self._remains else []))

    def __enter__(self) -> None:
        if not gc.get_freeze_count():  # other code has frozen objects, and wants that to stay
            gc.freeze()  # from here on, gc.get_objects() lists only new objects
            self._frozen = True

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        try:
            if error is not None:
                _clear_frames(error)
            search = error is not None or any(one() is not None for one in self._watched)
            if search and self._frozen:
                self._new = {id(one) for one in gc.get_objects()}
        finally:
            if self._frozen:
                gc.unfreeze()
        if search:
            self._remove_all()

    def _remove_all(self) -> None:
        for _ in range(ROUNDS):
            gc.collect()
            found = self._remaining()
            if not found:
                return
            if not self._remove(found):
                break
            del found
        self._remains = True

    def _remaining(self) -> list[Any]:
        fakes = (one for one in gc.get_objects() if issubclass(type(one), FakeTensor))
        return [one for one in fakes if one.fake_mode is self._mode]

    def _remove(self, targets: list[Any]) -> bool:
        """Remove these from all containers and attributes; of new or immutable containers, remove the container itself.
        True: something was removed."""
        taken = False
        seen = {id(one) for one in targets}
        for _ in range(DEEP):
            above: list[Any] = []
            ids = {id(one) for one in targets}
            asked = tuple(targets)  # a tuple is passed on as it is; for a list, Python 3.13 reports a copy
            for holder in gc.get_referrers(*asked):
                if holder is targets or holder is asked or id(holder) in seen or isinstance(holder, FrameType):
                    continue
                owner = _owner(holder) if type(holder) is dict else holder
                if issubclass(type(owner), FakeTensor):
                    continue
                if self._goes_whole(owner):
                    seen.add(id(owner))
                    above.append(owner)
                elif _remove_from(holder, owner, ids):
                    taken = True
                    self._removed = self._removed or not isinstance(holder, CellType) or _is_of_a_function(holder)
            if not above:
                break
            targets = above
        return taken

    def _goes_whole(self, owner: Any) -> bool:
        if issubclass(type(owner), tuple | frozenset):
            return True
        # The collector does not track empty dicts: one that it lists as new may be older.
        apart = (dict, CellType, FunctionType, ModuleType, type)
        return id(owner) in self._new and not issubclass(type(owner), apart)


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes, which hold the tensors that it happened with."""
    told: BaseException | None = error
    seen: set[int] = set()
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        traceback.clear_frames(told.__traceback__)
        told = told.__cause__ or told.__context__


def _owner(space: dict[Any, Any]) -> Any:
    """The object whose `__dict__` this is; the dict itself if there is none."""
    for one in gc.get_referrers(space):
        if attributes(one) is space:
            return one
        if isinstance(one, type) and all(vars(one).get(name) is value for name, value in space.items()):
            return one
    return space


def _remove_from(holder: Any, owner: Any, ids: set[int]) -> bool:
    """Remove the tensors from one holder; False: it holds none that can be removed."""
    if isinstance(holder, python.LruCache):
        holder.cache_clear()
    elif isinstance(holder, CellType):
        holder.cell_contents = None
    elif owner is not holder or not issubclass(type(holder), dict | list | deque | set):
        return _reset_attributes(owner, ids)
    elif issubclass(type(holder), dict):
        for key in [key for key, value in holder.items() if id(value) in ids or id(key) in ids]:
            dict.pop(holder, key)
    elif issubclass(type(holder), set):
        for one in [one for one in holder if id(one) in ids]:
            holder.discard(one)
    else:
        held = [one for one in holder if id(one) not in ids]
        holder.clear()
        holder.extend(held)
    return True


def _is_of_a_function(cell: CellType) -> bool:
    """Whether a function that is in use has this cell. Otherwise only frames of an error still refer to it."""
    owners = (
        owner for cells in gc.get_referrers(cell) if isinstance(cells, tuple) for owner in gc.get_referrers(cells)
    )
    functions = [owner for owner in owners if isinstance(owner, FunctionType)]
    return any(not isinstance(one, FrameType | list) for one in gc.get_referrers(*functions))


def _reset_attributes(owner: Any, ids: set[int]) -> bool:
    """Reset attributes that hold the tensors: to None if `__init__` makes them, else delete them."""
    names = [name for name, value in _all_attributes(owner) if id(value) in ids]
    for name in names:
        if isinstance(owner, ModuleType | FunctionType):
            vars(owner)[name] = None
        elif isinstance(owner, type):
            type.__setattr__(owner, name, None)
        elif _begins_with(type(owner), name):
            object.__setattr__(owner, name, None)
        else:
            object.__delattr__(owner, name)
    return bool(names)


def _all_attributes(owner: Any) -> list[tuple[str, Any]]:
    found = list((attributes(owner) or {}).items()) if not isinstance(owner, type) else list(vars(owner).items())
    for cls in () if isinstance(owner, type) else type(owner).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                found.append((name, object.__getattribute__(owner, name)))
    return found


def _begins_with(cls: type, name: str) -> bool:
    """True if an `__init__` makes this attribute, and no class has a default for it."""
    if any(name in vars(one) and name not in vars(one).get("__slots__", ()) for one in cls.__mro__):
        return False
    codes = (getattr(vars(one).get("__init__"), "__code__", None) for one in cls.__mro__)
    return any(name in code.co_names for code in codes if code is not None)
