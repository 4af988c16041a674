"""Keeps any number of rows in a bounded part of a file: all of them at first; later, of ever larger groups of
neighbours, those with the lowest and the highest value. So a file that is only appended to stays small, and all its
rows are real ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Row = Sequence[float | None]
Key = tuple[str, int, str]
"""kind, rank, name"""

PART = 4
"""groups grow when their rows have taken this fraction (1/PART) of the bytes that are left"""
ROW = 32
"""estimated bytes of a row that is not written yet"""


class Thinner:
    """Series of rows that share a number of bytes."""

    def __init__(self, budget: int, most: int) -> None:
        """`most`: the largest number of series; rows of more series are left out."""
        self.left_out = 0
        """rows that were left out"""
        self._left = budget
        self._most = most
        self._written = 0
        """bytes since groups have grown last"""
        self._groups: dict[Key, _Group] = {}
        self._ready: dict[Key, list[Row]] = {}
        self._waiting = 0
        """rows in `_ready`"""

    def add(self, key: Key, rows: Sequence[Row], judged: Sequence[int]) -> None:
        """`judged`: the columns whose extremes are kept."""
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= self._most:
                self.left_out += len(rows)
                return
            group = self._groups[key] = _Group(judged)
        for row in rows:
            if kept := group.add(row):
                self._put(key, kept)
                if self._written + self._waiting * ROW > max(0, self._left) // PART:
                    self._grow()

    def ready(self, *, end: bool = False) -> dict[Key, list[Row]]:
        """Rows to be written; at the end also those of unfinished groups, with their last row."""
        if end:
            for key, group in self._groups.items():
                if rows := group.take(last=True):
                    self._put(key, rows)
        ready, self._ready, self._waiting = self._ready, {}, 0
        return ready

    def written(self, size: int) -> None:
        """So many bytes were written to the file."""
        self._written += size

    def _put(self, key: Key, rows: list[Row]) -> None:
        self._ready.setdefault(key, []).extend(rows)
        self._waiting += len(rows)

    def _grow(self) -> None:
        """Enlarge the groups of the series that have taken most: what is logged once an epoch is kept in full."""
        self._left -= self._written + self._waiting * ROW
        self._written = -self._waiting * ROW  # these are accounted for
        mean = sum(group.taken for group in self._groups.values()) / sum(g.taken > 0 for g in self._groups.values())
        for group in self._groups.values():
            if group.taken >= mean:
                group.width = max(4, 2 * group.width)
            group.taken = 0


class _Group:
    """Neighbours in one series, of which few are kept."""

    __slots__ = ("_count", "_high", "_judged", "_last", "_low", "_odd", "taken", "width")

    def __init__(self, judged: Sequence[int]) -> None:
        self.width = 1
        """rows in a group"""
        self.taken = 0
        """rows kept since groups have grown last"""
        self._judged = judged
        self._count = 0
        self._low: dict[int, tuple[float, tuple[int, Row]]] = {}
        self._high: dict[int, tuple[float, tuple[int, Row]]] = {}
        self._odd: tuple[int, Row] | None = None
        """the first with a value that is not finite"""
        self._last: tuple[int, Row] | None = None
        """None: it was kept"""

    def add(self, row: Row) -> list[Row]:
        """The rows to keep, once the group is full."""
        if self.width == 1:
            self.taken += 1
            return [row]
        self._count += 1
        self._last = here = (self._count, row)
        for at in self._judged:
            value = row[at]
            if value is None:
                continue
            if self._odd is None and not math.isfinite(value):
                self._odd = here
            if value != value:
                continue
            if at not in self._low or value < self._low[at][0]:
                self._low[at] = (value, here)
            if at not in self._high or value > self._high[at][0]:
                self._high[at] = (value, here)
        return self.take() if self._count >= self.width else []

    def take(self, *, last: bool = False) -> list[Row]:
        """The rows to keep, in order; with `last` also the last row, even if its group is finished."""
        kept = dict(self._kept())
        if last and self._last is not None:
            kept.setdefault(*self._last)
        if self._last is not None and self._last[0] in kept:
            self._last = None
        self.taken += len(kept)
        self._count = 0
        self._low, self._high, self._odd = {}, {}, None
        return [kept[place] for place in sorted(kept)]

    def _kept(self) -> Iterator[tuple[int, Row]]:
        for extremes in (self._low, self._high):
            for _, here in extremes.values():
                yield here
        if self._odd is not None:
            yield self._odd
