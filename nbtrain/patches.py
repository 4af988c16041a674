"""Replaces functions of torch and puts them back.

A plain loop works because a few functions of torch are replaced on a rank: by `training.runtime` under every strategy,
and by a strategy while it has something that needs it. A rank inside the kernel must leave torch as it was, so every
replacement is remembered and undone in reverse order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner")
MISSING = object()


class Patches:
    """What was replaced, and how to undo it."""

    def __init__(self) -> None:
        self.undone: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(old)`. An attribute that was only inherited is removed again by `undo`."""
        before = vars(owner).get(name, MISSING)
        old = getattr(owner, name) if before is MISSING else before
        new = make(old)
        if callable(new) and not isinstance(new, type):
            new = functools.wraps(old)(new)  # pickled by name, shown by `help`: as the old one
        setattr(owner, name, new)
        self.undone.append(lambda: _put_back(owner, name, before, new))

    def keep(self, handle: Any) -> None:
        """A hook's handle, removed by `undo`."""
        self.undone.append(handle.remove)

    def undo(self) -> None:
        while self.undone:
            self.undone.pop()()


class While(Generic[Owner]):
    """Patches that are there while at least one owner wants them."""

    def __init__(self, put: Callable[[Patches], None]) -> None:
        self.owners: list[Owner] = []
        self._put = put
        self._patches = Patches()

    def on(self, owner: Owner) -> None:
        if not self.owners:
            self._put(self._patches)
        self.owners.append(owner)

    def off(self, owner: Owner) -> None:
        """An owner that is not there is none."""
        if owner in self.owners:
            self.owners.remove(owner)
            if not self.owners:
                self._patches.undo()


def _put_back(owner: Any, name: str, before: Any, new: Any) -> None:
    if vars(owner).get(name) is not new:  # somebody has replaced it since: theirs calls ours, which is inert by then
        return
    if before is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
