"""Tables for a terminal, and the same as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WIDE = 60
"""so many characters a note has in a line"""


@dataclass(slots=True)
class Sheet:
    """One table: its last column is words, the others but the first are numbers."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def row(self, *cells: str) -> None:
        """What is left out at the end is empty."""
        self.rows.append((*cells, *[""] * (len(self.head) - len(cells))))

    def failed(self, name: str, why: str) -> None:
        self.rows.append((name, *["–"] * (len(self.head) - 2), why))

    def text(self) -> str:
        return "\n".join(["", self.title, "", *self._lines()])

    def markdown(self) -> str:
        last = len(self.head) - 1
        rules = [":--" if column in (0, last) else "--:" for column in range(len(self.head))]
        body = [self.head, rules, *([cell.replace("|", "\\|") for cell in row] for row in self.rows)]
        return "\n".join([f"### {self.title}", "", *("| " + " | ".join(row) + " |" for row in body), ""])

    def _lines(self) -> Iterator[str]:
        last = len(self.head) - 1
        widths = [max(len(row[column]) for row in (self.head, *self.rows)) for column in range(last)]
        for number, row in enumerate((self.head, *self.rows)):
            numbers = [cell.rjust(width) for cell, width in zip(row[1:last], widths[1:], strict=True)]
            for part in textwrap.wrap(row[last], WIDE) or [""]:
                yield "  ".join([row[0].ljust(widths[0]), *numbers, part]).rstrip()
                row, numbers = ("",) * len(row), [" " * width for width in widths[1:]]
            if not number:
                yield "  ".join("─" * width for width in (*widths, max(len(self.head[last]), 4)))


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def spread(counts: Sequence[int]) -> str:
    """What each rank has, where that differs by more than a twentieth."""
    if max(counts) <= 1.05 * min(counts):
        return ""
    return "ranks: " + ", ".join(f"{count / 1e6:,.0f}" for count in counts) + " MB"


def times(this: float, that: float | None) -> str:
    return f"{this / that:.2f} ×" if that else "–"
