"""Changes of a text at places of its syntax tree: what is around them, comments too, stays as it was written."""

from __future__ import annotations

from typing import Any


class Edits:
    """Insertions and replacements, all by the places of the text as it was."""

    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[tuple[int, int, bytes]] = []

    def place(self, line: int | None, column: int | None) -> int:
        """The byte there."""
        return self._starts[(line or 1) - 1] + (column or 0)

    def around(self, node: Any, before: str, after: str) -> None:
        start, end = self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)
        self._found += [(start, start, before.encode()), (end, end, after.encode())]

    def replace(self, node: Any, new: str) -> None:
        start, end = self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)
        self._found.append((start, end, new.encode()))

    def text(self) -> str:
        raw = self.raw
        for start, end, new in sorted(self._found, key=lambda edit: edit[:2])[::-1]:
            raw = raw[:start] + new + raw[end:]
        return raw.decode()
