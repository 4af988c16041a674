"""Keeps the sources of cells for tracebacks on a rank, and drops old ones that nothing needs."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Iterable
from types import FunctionType

from nbtrain.messages import LATELY, CellSource


class CellSources:
    """The cells in `linecache`. An old one stays while a function defined in it lives."""

    def __init__(self, numbers: dict[str, int] | None) -> None:
        """`numbers`: where IPython looks a cell's number up."""
        self._numbers = numbers
        self._known: dict[str, None] = {}
        """the latest last"""
        self._full = 2 * LATELY
        """number of sources at which old ones are dropped"""

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
