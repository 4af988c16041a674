"""Sorts names as the notebook has them, without going through all of them for each cell.

IPython keeps a few names for every cell that ever ran, so after a day's work tens of thousands surround the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FEW = 1000
"""Names that are remembered, deleted ones among them, before it is checked which are still there."""


class NameOrder:
    """Remembers where in one namespace the names are that were asked for. A name that was deleted and bound again may
    keep its place."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._places: dict[str, int] = {}
        self._next = 0
        self._room = FEW

    def ordered(self, names: Iterable[str]) -> list[str]:
        """The names among these that the namespace has, in its order."""
        wanted = {name for name in names if name in self._namespace}
        new = wanted - self._places.keys()
        if new and not self._follow(new):
            self._look(new)
        # a thread of the user's may have deleted one in this moment
        return sorted(wanted & self._places.keys(), key=self._places.__getitem__)

    def _follow(self, new: set[str]) -> bool:
        """Give places to these names if all are at the end of the namespace, behind every name that is known. False:
        they are not, which is rare."""
        if len(self._places) + len(new) > self._room:
            return False
        behind: list[str] = []
        try:
            for name in reversed(self._namespace):
                if name in new:
                    behind.append(name)
                    if len(behind) == len(new):
                        break
                elif name in self._places:
                    return False
        except RuntimeError:  # a thread of the user's binds names meanwhile
            return False
        for name in reversed(behind):
            self._places[name] = self._next
            self._next += 1
        return len(behind) == len(new)

    def _look(self, new: set[str]) -> None:
        """Go through all names of the namespace, and forget those that are gone."""
        every = list(self._namespace)
        self._places = {name: at for at, name in enumerate(every) if name in new or name in self._places}
        self._next = len(every)
        self._room = max(FEW, 2 * len(self._places))
