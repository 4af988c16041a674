"""What a cell is, once the magic line is taken off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    source: str
    """the body as typed, from its first line that is not blank"""
    filename: str
    """what tracebacks call this cell; `linecache` knows its text under it"""
    first_line: int
    """the line of the notebook's cell on which the body starts, from 1"""
    number: int | None
    """its execution number, if it has one"""
