"""A strategy's options as inputs of a form, made of its dataclass; and what was typed there, as words of a line."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from nbtrain.errors import UsageError
from nbtrain.magics.line import flags
from nbtrain.magics.line.flags import Flag
from nbtrain.magics.line.resolve import Chosen
from nbtrain.magics.line.split_line import Word, split
from nbtrain.magics.line.values import Namespace

KINDS = ("switch", "choice", "number", "text")

_helps: WeakKeyDictionary[type, dict[str, str]] = WeakKeyDictionary()
"""sources are read once: it takes milliseconds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One option."""

    field: str
    flag: str
    kind: str
    """one of KINDS"""
    value: str
    """as it is typed; of a switch `on` or `off`"""
    usual: str
    """what it is unless something is typed: the preset's, or the default"""
    choices: tuple[str, ...]
    help: str


def inputs(chosen: Chosen, typed: Mapping[str, str]) -> list[Input]:
    """One for each option, in the order of the dataclass. `typed`: by field."""
    cls = chosen.load()
    said, carried = helps(cls.Options), chosen.carried()
    found: list[Input] = []
    for flag in _by_field(cls).values():
        usual = shown(carried.get(flag.field, flag.default))
        found.append(
            Input(
                field=flag.field,
                flag=flag.flag,
                kind=_kind(flag),
                value=typed.get(flag.field, usual),
                usual=usual,
                choices=flag.choices,
                help=said.get(flag.field, ""),
            )
        )
    return found


def words(inputs: list[Input]) -> list[str]:
    """What of it has to be written: all that is not as usual."""
    found: list[str] = []
    for one in inputs:
        if one.value == one.usual:
            continue
        if one.kind == "switch":
            found.append(one.flag if one.value == "on" else "--no-" + one.flag[2:])
        else:
            found += [one.flag, _word(one.value)]
    return found


def values(chosen: Chosen, typed: Mapping[str, str], notebook: Namespace) -> dict[str, Any]:
    """The options by field, read as a line's are: raises what is wrong with them in a sentence."""
    options, known = chosen.carried(), _by_field(chosen.load())
    for name, text in typed.items():
        flag = known[name]
        if not text:
            usual = shown(options.get(name, flag.default))
            raise UsageError(f"{flag.flag} needs a value; the usual one is {usual}")
        word = Word(text if flag.type is bool else _word(text))
        options[name] = flags.read(flag.flag, word, flag, notebook)
    return options


def typed_of(chosen: Chosen, own: Mapping[str, Word | None]) -> dict[str, str]:
    """By field what a line says: `{"--no-cpu-offload": None}` → `{"cpu_offload": "off"}`."""
    known, found = flags.flags_of(chosen.load()), {}
    for flag, word in own.items():
        if flag in known:
            one = known[flag]
            negated = flag != one.flag
            found[one.field] = word.plain if word is not None else "off" if negated else "on"
    return found


def shown(value: Any) -> str:
    """A default, as it would be typed; what there is no word for is nothing."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value is ... or value in ((), [], {}, set(), frozenset()):
        return ""
    several = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    return ",".join(str(getattr(one, "__name__", one)) for one in several)


def helps(options: type) -> dict[str, str]:
    """What stands below each field in the source; nothing where there is no source to be read."""
    if options not in _helps:
        _helps[options] = _read_helps(options)
    return _helps[options]


def _read_helps(options: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for cls in reversed(options.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        body = getattr(tree, "body", [])
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    found[name] = " ".join(text.split())
    return found


def _by_field(cls: type) -> dict[str, Flag]:
    return {flag.field: flag for typed, flag in flags.flags_of(cls).items() if typed == flag.flag}


def _kind(flag: Flag) -> str:
    if flag.type is bool:
        return "switch"
    if flag.choices:
        return "choice"
    return "number" if flag.type in (int, float) else "text"


def _word(text: str) -> str:
    """What was typed into one field is one word, spaces or not."""
    text = text.strip()
    try:
        whole = len(split(text)) == 1
    except UsageError:
        whole = False
    if whole and not Word(text).is_flag:
        return text
    return f'"{text}"' if '"' not in text else f"'{text}'"
