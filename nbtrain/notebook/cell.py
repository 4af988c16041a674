"""A cell without its magic line, as `magics` hands it to the session: its code, and what was typed above it."""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass

_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True, slots=True)
class Cell:
    source: str
    """the body as typed, from its first line that is not blank"""
    code: str
    """what IPython makes of the body, moved down so that its lines are the notebook's"""
    filename: str
    """what tracebacks call this cell; `linecache` knows its text under it"""
    first_line: int
    """the line of the notebook's cell on which the body starts, from 1"""
    number: int | None
    """its execution number, if it has one"""

    @property
    def quiet(self) -> bool:
        """Whether it ends in a semicolon, perhaps with a comment behind: then its last value is not shown."""
        if ";" not in self.source:
            return False
        last = ""
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
                last = last if token.type in _NOT_CODE else token.string
        except (tokenize.TokenError, SyntaxError):  # magics are no Python
            return self.source.rstrip().endswith(";")
        return last == ";"
