"""Parses a magic's line and checks it word by word. A strategy's own flags are checked later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line import values
from nbtrain.notebook.magics.line.options import BY_FLAG, BY_NAME, Option
from nbtrain.notebook.magics.line.split_line import Word, split
from nbtrain.notebook.magics.line.values import Namespace

TAKES_BACK = frozenset({"off", "none", "no", "default", "reset", "false"})
"""What people write behind an option to have no longer what they have chosen."""


@dataclass(frozen=True, slots=True)
class Given:
    """One option of the table as the user gave it."""

    value: Any
    typed: str
    """`--devices 4`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One parsed line."""

    words: tuple[Word, ...] = ()
    """what is not an option: a verb, ranks"""
    given: Mapping[str, Given] = field(default_factory=dict)
    own: Mapping[str, Word | None] = field(default_factory=dict)
    """flags that are not in the table, so they must be the strategy's. None: nothing follows the flag"""

    def value(self, name: str) -> Any:
        return self.given[name].value if name in self.given else BY_NAME[name].default

    def argument(self, takes: str, number: bool = False) -> str:
        """The word behind a verb; empty without one. `takes`: what that is, of which there is one; `number`: in
        digits."""
        verb, *words = (word.plain for word in self.words)
        if len(words) > 1 or (number and not "".join(words or "0").isdecimal()):
            raise UsageError(f"{verb} takes {takes}, not {' '.join(words)!r}")
        return "".join(words)

    def over(self, base: Request) -> Request:
        """This line, completed by `base`."""
        return Request(words=self.words, given={**base.given, **self.given}, own={**base.own, **self.own})

    def trials(self) -> list[str]:
        """Its options with which a cell is tried and not run."""
        return [name for name in self.given if BY_NAME[name].trial and self.value(name)]

    def __str__(self) -> str:
        own = [flag if word is None else f"{flag} {word.text}" for flag, word in self.own.items()]
        return " ".join([*(given.typed for given in self.given.values()), *own])


def parse(line: str, notebook: Namespace) -> Request:
    """Raises UsageError in one line that quotes what was typed."""
    words: list[Word] = []
    given: dict[str, Given] = {}
    own: dict[str, Word | None] = {}
    rest = _apart(split(line))
    while rest:
        word = rest.pop(0)
        if not word.is_flag:
            words.append(word)
            continue
        flag = word.text if word.text in BY_FLAG else word.text.replace("_", "-")
        option = BY_FLAG.get(flag)
        if option is None:
            _together(word.text, notebook)
            _once(flag, own)
            own[flag] = rest.pop(0) if rest and not rest[0].is_flag else None
            continue
        _once(option.flag, (BY_NAME[name].flag for name in given))
        if option.read is None:
            if rest and rest[0].plain.lower() in values.SWITCH:
                word = rest.pop(0)
                given[option.name] = Given(values.SWITCH[word.plain.lower()], f"{option.flag} {word.text}")
            elif rest and not rest[0].is_flag:
                raise UsageError(f"{option.flag} is a switch and takes no value, and got {rest[0].text}")
            else:
                given[option.name] = Given(True, option.flag)
        else:
            if not rest or rest[0].is_flag:
                raise UsageError(f"{flag} needs a value: {option.usage}")
            value = rest.pop(0)
            given[option.name] = Given(_read(option, flag, value, notebook), f"{option.flag} {value.text}")
    return Request(words=tuple(words), given=given, own=own)


def _apart(words: list[Word]) -> list[Word]:
    """Split `--devices=4` into two words."""
    parted: list[Word] = []
    for word in words:
        flag, equals, value = word.text.partition("=")
        if word.is_flag and equals:
            if not value:
                raise UsageError(f"{word.text} has no value behind the =")
            parted += [Word(flag, word.start), Word(value, word.start + len(flag) + 1)]
        else:
            parted.append(word)
    return parted


def _together(text: str, notebook: Namespace) -> None:
    """Refuse `-d2`, which is a short option and a value for it."""
    option = BY_FLAG.get(text[:2])
    if option is None or option.read is None:
        return
    try:
        option.read(text[:2], Word(text[2:]), notebook)
    except UsageError:
        return
    raise UsageError(f"{text}: write {text[:2]} {text[2:]}")


def _read(option: Option, flag: str, word: Word, notebook: Namespace) -> Any:
    """The value; `off` takes back an option without a default."""
    assert option.read is not None
    if word.text == "off" and not option.default and not option.trial:
        return option.default
    try:
        return option.read(flag, word, notebook)
    except UsageError as error:
        if word.plain.lower() not in TAKES_BACK:
            raise
        raise UsageError(f"{flag} {word.text}: write {flag} {option.usual} to take the option back") from error


def _once(flag: str, seen: Any) -> None:
    # The last one winning would hide a typing mistake in a long line.
    if flag in seen:
        raise UsageError(f"{flag} is given twice")


def instead(request: Request, notebook: Namespace) -> str:
    """`; write --strategy ddp` for a line that has the value of an option without the option, or nothing."""
    word = request.words[0]
    if word.text.isdecimal():
        return f"; write --devices {word.text}"
    try:
        values.strategy("--strategy", word, notebook)
    except UsageError:
        return ""
    if "compare" in request.given:
        together = [request.given["compare"].typed, *(word.text for word in request.words)]
        return f"; write {','.join(strategies.strip(',') for strategies in together)}"
    return f"; write --strategy {word.text}"


def parse_ranks(words: tuple[Word, ...]) -> tuple[int, ...]:
    """`0,2`, `0-2`, `0, 2-3`; in order, each once."""
    text = "".join(word.plain for word in words)
    if not text:
        raise UsageError("which ranks? Write %%rank 0 or %%rank 0,2 or %%rank 0-2")
    return values.ranks(text)
