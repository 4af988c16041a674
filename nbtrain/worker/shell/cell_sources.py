"""The texts of cells on a rank: tracebacks show lines of the notebook, and a long session is not kept for that."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Iterable
from types import FunctionType

from nbtrain.messages import LATELY, CellSource


class CellSources:
    """What `linecache` knows of the notebook's cells. Old ones stay where a function that lives was made."""

    def __init__(self, numbers: dict[str, int] | None) -> None:
        """`numbers`: where IPython looks a cell's number up."""
        self._numbers = numbers
        self._known: dict[str, None] = {}
        """those that were told last at the end"""
        self._full = 2 * LATELY
        """so many are looked through"""

    def learn(self, sources: Iterable[CellSource]) -> None:
        for source in sources:
            lines = source.text.splitlines(keepends=True)
            linecache.cache[source.filename] = (len(source.text), None, lines, source.filename)
            if self._numbers is not None and source.number is not None:
                self._numbers[source.filename] = source.number
            self._known.pop(source.filename, None)
            self._known[source.filename] = None
        if len(self._known) >= self._full:
            self._let_go()
            self._full = 2 * max(LATELY, len(self._known))

    def _let_go(self) -> None:
        alive = {obj.__code__.co_filename for obj in gc.get_objects() if type(obj) is FunctionType}
        for filename in list(self._known)[:-LATELY]:
            if filename not in alive:
                del self._known[filename]
                linecache.cache.pop(filename, None)
                if self._numbers is not None:
                    self._numbers.pop(filename, None)
