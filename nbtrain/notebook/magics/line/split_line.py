"""Splits a magic's line into words, with their quotes, and with brackets kept together."""

from __future__ import annotations

from dataclasses import dataclass

from nbtrain.base.errors import UsageError

_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Word:
    """One word, exactly as typed. Quotes matter: `--devices "3"` is GPU 3 and `--devices 3` is three GPUs."""

    text: str
    start: int = 0

    @property
    def quoted(self) -> bool:
        return len(self.text) > 1 and self.text[0] in "'\"" and self.text[-1] == self.text[0]

    @property
    def plain(self) -> str:
        """Without the quotes."""
        return self.text[1:-1] if self.quoted else self.text

    @property
    def is_flag(self) -> bool:
        """`-d`, `--devices`, but not `-1`."""
        return self.text.lstrip("-")[:1].isalpha() and self.text.startswith("-")


def split(line: str, *, unfinished: bool = False) -> list[Word]:
    """The words of a line, up to `# ...`. `unfinished`: the user is still typing, so an open quote is no mistake."""
    words: list[Word] = []
    start: int | None = None
    quote = ""
    brackets: list[str] = []
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char.isspace() and not brackets:
            if start is not None:
                words.append(Word(line[start:at], start))
                start = None
        elif char == "#" and start is None:
            return words
        else:
            start = at if start is None else start
            if char in "'\"":
                quote = char
            elif char in _CLOSING:
                brackets.append(_CLOSING[char])
            elif brackets and char == brackets[-1]:
                brackets.pop()
    if start is not None:
        words.append(Word(line[start:], start))
    if (quote or brackets) and not unfinished:
        raise UsageError(f"{words[-1].text!r} is not closed: {quote or brackets[-1]} is missing")
    return words
