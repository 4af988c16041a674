"""Changes of a text at places of its syntax tree: what is around them, comments too, stays as it was written."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any


class Edits:
    """Insertions and replacements, all by the places of the text as it was."""

    def __init__(self, text: str) -> None:
        self._raw = text.encode()
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[tuple[int, int, bytes]] = []

    def around(self, node: Any, before: str, after: str) -> None:
        self.replace((node.lineno, node.col_offset), (node.lineno, node.col_offset), before)
        self.replace((node.end_lineno, node.end_col_offset), (node.end_lineno, node.end_col_offset), after)

    def replace(self, start: tuple[int, int], end: tuple[int, int], new: str) -> None:
        self._found.append((self._starts[start[0] - 1] + start[1], self._starts[end[0] - 1] + end[1], new.encode()))

    def text(self) -> str:
        raw = self._raw
        for start, end, new in sorted(self._found, key=lambda one: one[:2])[::-1]:
            raw = raw[:start] + new + raw[end:]
        return raw.decode()


def suites(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Statements that stand below each other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            found = getattr(node, name, None)
            if isinstance(found, list) and found:
                yield found


def under_condition(text: str, condition: str, which: Callable[[ast.Module], set[int]]) -> str:
    """The text with `if condition:` before these statements, given by id; neighbours have one in common."""
    text = _one_per_line(text, which)
    edits, lines = Edits(text), text.splitlines()
    tree = ast.parse(text)
    chosen = which(tree)
    for suite in suites(tree):
        last: ast.stmt | None = None
        for one in suite:
            if id(one) not in chosen:
                last = None
                continue
            indent = " " * one.col_offset
            first = one.lineno if last is None else (last.end_lineno or 0) + 1
            if last is None:
                edits.replace((first, 0), (first, 0), f"{indent}if {condition}:\n")
            for line in range(first, (one.end_lineno or 0) + 1):
                if lines[line - 1].strip():
                    edits.replace((line, 0), (line, 0), "    ")
            last = one
    return edits.text()


def _one_per_line(text: str, which: Callable[[ast.Module], set[int]]) -> str:
    """Suites with such a statement, without `;` and with nothing behind a colon."""
    edits, lines = Edits(text), text.splitlines()
    tree = ast.parse(text)
    chosen = which(tree)
    for suite in suites(tree):
        if not any(id(one) in chosen for one in suite):
            continue
        first = suite[0]
        line = lines[first.lineno - 1]
        before = line.encode()[: first.col_offset].decode()
        indent = " " * first.col_offset
        if before.strip():  # behind the colon
            indent = " " * (len(line) - len(line.lstrip()) + 4)
            start = first.lineno, len(before.rstrip().encode())
            edits.replace(start, (first.lineno, first.col_offset), "\n" + indent)
        for one, other in pairwise(suite):
            if one.end_lineno == other.lineno:
                start = one.end_lineno or 0, one.end_col_offset or 0
                edits.replace(start, (other.lineno, other.col_offset), "\n" + indent)
    return edits.text()
