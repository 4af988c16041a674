"""Makes a form of a strategy's options dataclass, and turns what is typed there into words of a line."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line import strategy_flags
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.line.split_line import Word, split
from nbtrain.notebook.magics.line.strategy_flags import Flag
from nbtrain.notebook.magics.line.values import Namespace

KINDS = ("switch", "choice", "number", "text")

_helps: WeakKeyDictionary[type, dict[str, str]] = WeakKeyDictionary()
"""read from the source once per class, as it takes milliseconds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input of the form."""

    field: str
    flag: str
    kind: str
    """one of KINDS"""
    value: str
    """as it is typed; `on` or `off` for a switch"""
    usual: str
    """the value unless something is typed: the preset's, or the default"""
    choices: tuple[str, ...]
    help: str


def inputs(chosen: Chosen, typed: Mapping[str, str]) -> list[Input]:
    """An input for each option, in the order of the dataclass. `typed`: field → text."""
    cls = chosen.load()
    said, carried = helps(cls.Options), chosen.carried()
    found: list[Input] = []
    for flag in strategy_flags.by_field(cls).values():
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
    """The words of the line: only for inputs that are not as usual."""
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
    """field → value, read as on a line; raises a sentence about what is wrong."""
    options, known = chosen.carried(), strategy_flags.by_field(chosen.load())
    for name, text in typed.items():
        flag = known[name]
        if not text:
            usual = shown(options.get(name, flag.default))
            raise UsageError(f"{flag.flag} needs a value; the usual one is {usual}")
        word = Word(text if flag.type is bool else _word(text))
        options[name] = strategy_flags.read(flag.flag, word, flag, notebook)
    return options


def typed_of(chosen: Chosen, own: Mapping[str, Word | None]) -> dict[str, str]:
    """field → text of a line's flags: `{"--no-cpu-offload": None}` → `{"cpu_offload": "off"}`."""
    known, found = strategy_flags.flags_of(chosen.load()), {}
    for flag, word in own.items():
        if flag in known:
            one = known[flag]
            negated = flag != one.flag
            found[one.field] = word.plain if word is not None else "off" if negated else "on"
    return found


def shown(value: Any) -> str:
    """A default as it would be typed; empty where it cannot be."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value is ... or value in ((), [], {}, set(), frozenset()):
        return ""
    several = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    return ",".join(str(getattr(one, "__name__", one)) for one in several)


def helps(options: type) -> dict[str, str]:
    """The docstring below each field in the source; empty without a source."""
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


def _kind(flag: Flag) -> str:
    if flag.type is bool:
        return "switch"
    if flag.choices:
        return "choice"
    return "number" if flag.type in (int, float) else "text"


def _word(text: str) -> str:
    """Quote what was typed into one input, so that it is one word."""
    text = text.strip()
    try:
        whole = len(split(text)) == 1
    except UsageError:
        whole = False
    if whole and not Word(text).is_flag:
        return text
    return f'"{text}"' if '"' not in text else f"'{text}'"
