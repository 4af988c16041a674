"""Reads the values on a magic's line: literals, or names of the notebook."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.split_line import Word
from nbtrain.strategies import presets

Namespace = Mapping[str, Any]
Reader = Callable[[str, Word, Namespace], Any]
"""(flag, word, notebook) → value; raises UsageError that quotes what was typed"""

SWITCH: Mapping[str, bool] = {"true": True, "on": True, "false": False, "off": False}
"""What may follow a switch; a default is taken back with `off`."""
ALL = "all"


class Unreadable(UsageError):
    """Neither a literal nor a name of the notebook."""


def takes(flag: str, word: Word, what: str) -> UsageError:
    """The error of a value that is none of these."""
    return UsageError(f"{flag} {word.text}: {flag} takes {what}")


def evaluate(text: str, notebook: Namespace) -> Any:
    """Literals, names, attributes of names, and tuples, lists, sets and dicts of them. Nothing is called."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        raise Unreadable(f"{text!r} is neither a literal nor a name of the notebook") from None
    return _build(tree.body, text, notebook)


def _build(node: ast.expr, text: str, notebook: Namespace) -> Any:
    def build(inner: ast.expr | None) -> Any:
        if inner is None:
            raise Unreadable(f"{text!r}: ** cannot be used here")
        return _build(inner, text, notebook)

    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple():
            return tuple(map(build, node.elts))
        case ast.List():
            return list(map(build, node.elts))
        case ast.Set():
            return set(map(build, node.elts))
        case ast.Dict():
            return {build(key): build(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.Name(id=name):
            if name not in notebook:
                raise Unreadable(f"the notebook has no {name!r}")
            return notebook[name]
        case ast.Attribute(value=owner, attr=name):
            try:
                return getattr(build(owner), name)
            except AttributeError as error:
                raise Unreadable(str(error)) from None
    raise Unreadable(f"{text!r} is neither a literal nor a name of the notebook; assign it to a variable first")


def _value(text: str, notebook: Namespace) -> Any:
    """The value, or None where it cannot be read."""
    try:
        return evaluate(text, notebook)
    except Unreadable:
        return None


def _several(text: str, notebook: Namespace) -> tuple[Any, ...]:
    """The values of a tuple, list or range; a single one is a tuple of it."""
    value = _value(text, notebook)
    return tuple(value) if isinstance(value, tuple | list | range) else (value,)


def one_of(
    *choices: str, abbreviations: Mapping[str, str] | None = None, elsewhere: Mapping[str, str] | None = None
) -> Reader:
    """Read one of these words, or a notebook name that holds one. `elsewhere`: what other tools call them."""

    def read(flag: str, word: Word, notebook: Namespace) -> str:
        for value in (word.plain, notebook.get(word.text)):
            if isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            if isinstance(value, str) and (meant := (abbreviations or {}).get(value, value)) in choices:
                return meant
        from nbtrain.notebook.magics.line.suggestions import similar

        same = (elsewhere or {}).get(word.plain.lower())
        hint = f"; did you mean {same}?" if same else similar(word.plain, choices)
        raise UsageError(f"{flag} {word.text}: {flag} is one of {', '.join(choices)}{hint}")

    return read


def names(flag: str, word: Word, notebook: Namespace) -> tuple[str, ...]:
    """`a,b`; the cell may be what makes these names."""
    parts = tuple(part.strip() for part in word.plain.strip("[]()").split(",") if part.strip())
    if wrong := [name for name in parts if not name.isidentifier()]:
        raise takes(flag, word, f"names, as in {flag} cache,best, and {wrong[0]!r} is none")
    return parts


def classes(flag: str, word: Word, notebook: Namespace) -> tuple[str, ...]:
    """`Block,nn.Linear`: names of classes, or of notebook variables that hold classes or lists of them."""
    names_of_classes: list[str] = []
    for part in filter(None, map(str.strip, word.plain.strip("[](){}").split(","))):
        try:
            value = evaluate(part, notebook)
        except Unreadable:
            value = part if part.isidentifier() else None
        several = value if isinstance(value, tuple | list | set | frozenset) else (value,)
        named = [item.__name__ if isinstance(item, type) else item for item in several]
        if not all(isinstance(item, str) and item.isidentifier() for item in named):
            raise takes(flag, word, f"classes, as in {flag} Block, and {part!r} is none")
        names_of_classes += named
    return tuple(dict.fromkeys(names_of_classes))


def count(flag: str, word: Word, notebook: Namespace) -> int:
    """1, 2, 3, ...; 1e3."""
    value = _value(word.text, notebook)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        raise takes(flag, word, "a whole number, 1 or more")
    return value


def hosts(flag: str, word: Word, notebook: Namespace) -> tuple[str, ...]:
    """`a,b`: names of machines, or a name of the notebook that holds a list of them."""
    value = notebook.get(word.plain)
    parts = value if isinstance(value, list | tuple) else word.plain.strip("[]()").split(",")
    machines = tuple(str(part).strip().strip("\"'") for part in parts if str(part).strip())
    if wrong := [machine for machine in machines if not re.fullmatch(r"(?!-)[\w.@:%-]+", machine)]:
        raise takes(flag, word, f"names of machines, as in {flag} node1,node2: {wrong[0]!r}?")
    return machines


def program(flag: str, word: Word, notebook: Namespace) -> str:
    """`/opt/env/bin/python`, or a name of the notebook that holds it."""
    value = notebook.get(word.text)
    return value if isinstance(value, str) else word.plain


def text(flag: str, word: Word, notebook: Namespace) -> str:
    """`"--partition gpu"`, or a name of the notebook that holds such a text."""
    command = program(flag, word, notebook)
    try:
        shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{flag} {word.text}: {error}") from None
    return command


def nodes(flag: str, word: Word, notebook: Namespace) -> int | tuple[int, int]:
    """1, 2, 3, ..., or MIN:MAX, for machines that come and go."""
    if ":" not in word.text:
        return count(flag, word, notebook)
    least, _, most = word.plain.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise UsageError(f"{flag} {word.text}: at least and at most so many machines are two numbers, as in {flag} 1:3")
    return int(least), int(most)


def seconds(flag: str, word: Word, notebook: Namespace) -> float:
    """60, 2.5."""
    value = _value(word.text, notebook)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise takes(flag, word, "a number of seconds, more than 0")
    return float(value)


def debug_ranks(flag: str, word: Word, notebook: Namespace) -> str | tuple[int, ...]:
    """`first`, `all`, or `0,2-3`"""
    return word.plain if word.plain in ("first", "all") else ranks(word.plain)


def ranks(text: str) -> tuple[int, ...]:
    """`0,2`, `0-2`, `0, 2-3`; in order, each once."""
    chosen: set[int] = set()
    for part in text.strip("[]").split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not span or int(span[2] or span[1]) < int(span[1]):
            raise UsageError(f"{text!r} is no list of ranks; write 0 or 0,2 or 0-2")
        chosen.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(chosen))


def counts(flag: str, word: Word, notebook: Namespace) -> tuple[int, ...]:
    """`1,2,4,8`, or a name that holds them; in order, each once."""
    numbers = _several(word.text, notebook)
    if len(numbers) < 2 or not all(type(number) is int and number > 0 for number in numbers):
        raise takes(flag, word, f"two numbers of ranks or more, as in {flag} 1,2,4,8")
    return tuple(sorted(set(numbers)))


def sizes(flag: str, word: Word, notebook: Namespace) -> tuple[str, tuple[Any, ...]]:
    """`layers=1,2,4,8` → the name, and its values, the smallest first."""
    name, _, text = word.plain.partition("=")
    values = _several(text, notebook)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not name.isidentifier() or not values or not numbers:
        raise takes(flag, word, f"a name of the notebook and the numbers to try, as in {flag} layers=2,4,8")
    if name not in notebook:
        from nbtrain.notebook.magics.line.suggestions import similar

        raise UsageError(
            f"{flag} {word.text}: the notebook has no {name!r}{similar(name, notebook)}; give it its present value in "
            f"a cell above ({name} = {values[0]}), and let the %%distributed cell make the model with it"
        )
    return name, tuple(sorted(set(values)))


def memory(flag: str, word: Word, notebook: Namespace) -> int:
    """`2GB`, `500MB`, `1.5GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", word.plain.strip().lower())
    if match is None or not float(match[1]):
        raise takes(flag, word, f"a size, as in {flag} 2GB or {flag} 500MB")
    return int(float(match[1]) * _factor(match[2], match[3]))


_BANDWIDTH = re.compile(r"(\d+\.?\d*|\.\d+)\s*(?:([kmgt]?)(i?)(bits?|bytes?|b)\s*(?:/\s*s|ps)?)?", re.I)


def bandwidth(flag: str, word: Word, notebook: Namespace) -> float:
    """Bytes a second: `25GB/s`, `100Gbit/s`, `3.2TB/s`; a bare number is GB/s."""
    what, how = f"{flag} {word.text}: {word.plain!r}", "write it as 25GB/s or 200Gbit/s"
    match = _BANDWIDTH.fullmatch(word.plain.strip())
    if match is None:
        raise UsageError(f"{what} is no bandwidth: {how}")
    number, prefix, binary, unit = match.groups()
    if unit == "b" and prefix in ("g", "m", "t"):  # who writes gb may well mean GB
        said = number + prefix.upper()
        raise UsageError(f"{what} may be bits or bytes: write {said}B/s or {said}bit/s")
    if unit is None:
        prefix, unit = "g", "B"
    value: float = float(number) * _factor(prefix, binary)
    if unit == "b" or unit.lower().startswith("bit"):
        value /= 8
    if not 0 < value < math.inf:
        raise UsageError(f"{what} is no bandwidth: it has to be more than 0; {how}")
    return value


def _factor(prefix: str, binary: str | None) -> int:
    """What `k`, `m`, `g` or `t` stands for; `binary`: with an `i` behind it."""
    return int((1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def name(flag: str, word: Word, notebook: Namespace) -> str:
    """A name of the notebook, or several: `x,y`; `trainer.batch` is an attribute of one."""
    for part in word.plain.split(","):
        first = part.strip().partition(".")[0]
        if first not in notebook:
            from nbtrain.notebook.magics.line.suggestions import similar

            hint = similar(first, (other for other in notebook if not other.startswith("_")))
            raise takes(flag, word, f"a name of the notebook, and it has no {first!r}{hint}")
    return word.plain


def interval(flag: str, word: Word, notebook: Namespace) -> tuple[int | None, float | None]:
    """`50` steps, or `45s`, `10m`, `1h30m` → (steps, None) or (None, seconds)."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", word.plain)
    if parts and any(parts.groups()):
        total = sum(int(number or 0) * unit for number, unit in zip(parts.groups(), (3600, 60, 1), strict=True))
        if total > 0:
            return None, float(total)
    try:
        return count(flag, word, notebook), None
    except UsageError:
        what = f"a number of steps, as in {flag} 500, or a time, as in {flag} 10m (45s, 1h30m)"
        raise takes(flag, word, what) from None


def moment(flag: str, word: Word, notebook: Namespace) -> float:
    """`11h45m` from now, or the next `22:30` → seconds since the epoch."""
    if clock := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", word.plain):
        now = datetime.now()
        then = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        return (then if then > now else then + timedelta(days=1)).timestamp()
    with suppress(UsageError):
        _, seconds = interval(flag, word, notebook)
        if seconds is not None:
            return time.time() + seconds
    raise takes(flag, word, f"a time from now, as in {flag} 11h45m, or a clock's, as in {flag} 22:30")


def folder(flag: str, word: Word, notebook: Namespace) -> str:
    """A path, or a notebook name that holds one."""
    value = word.plain if word.quoted else notebook.get(word.text, word.plain)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise takes(flag, word, f"the path of a folder, not {type(value).__name__}")
    return str(os.fspath(value))


def writer(flag: str, word: Word, notebook: Namespace) -> str:
    """The name of an object with `add_scalar`; `None` takes a default back."""
    name = word.plain
    if name == "None":
        return ""
    if name not in notebook:
        raise takes(flag, word, f"a name of the notebook, and it has no {name!r}")
    value = notebook[name]
    if isinstance(value, type) or not callable(getattr(value, "add_scalar", None)):
        from nbtrain.notebook.magics.own_strategies import kind_of

        raise UsageError(
            f"{flag} {word.text}: {name} is {kind_of(value)}; {flag} takes the name of a SummaryWriter, or of "
            "anything else with add_scalar(tag, value, step)"
        )
    return name


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the user wrote behind `--devices`."""

    value: Any
    """None, int, list, or the text"""
    quoted: bool = False

    @property
    def chosen_by_us(self) -> bool:
        return bool(self.value == "auto")


def devices(flag: str, word: Word, notebook: Namespace) -> DeviceSpec:
    """An unquoted integer is a number of devices; quotes, and strings in a variable, are lists of indices."""
    if word.quoted:
        return DeviceSpec(word.plain, quoted=True)
    if word.text == "auto":
        return DeviceSpec("auto")
    try:
        value = evaluate(word.text, notebook)
    except Unreadable:
        if word.text.isidentifier():
            raise UsageError(
                f"{flag} {word.text}: the notebook has no {word.text!r}; "
                f'write a number, "0,2" for devices 0 and 2, auto, free:2, or the name of a variable'
            ) from None
        return DeviceSpec(word.text)
    if isinstance(value, tuple) and not word.text.isidentifier() and "(" not in word.text:
        return DeviceSpec(word.text)
    if isinstance(value, str):
        return DeviceSpec(value, quoted=True)
    return DeviceSpec(list(value) if isinstance(value, tuple | range) else value)


def strategy(flag: str, word: Word, notebook: Namespace) -> str:
    """A strategy or a preset that nbtrain knows, or the notebook's name for one of its own."""
    if word.plain == "auto" or word.plain in presets.names() or registry.find_strategy(word.plain) is not None:
        return word.plain
    from nbtrain.notebook.magics.line.suggestions import which
    from nbtrain.notebook.magics.own_strategies import is_strategy, kind_of

    own = ["auto", *registry.strategies()]
    known = [*own, *presets.names()]
    if word.text in notebook:
        value = notebook[word.text]
        if is_strategy(value):
            return word.text
        if isinstance(value, str) and value in known:
            return value
        raise UsageError(
            f"{flag} {word.text}: {word.text} is {kind_of(value)}, not a strategy; "
            f"it has to be one of {', '.join(own)}, a preset, or a subclass of nbtrain.Strategy"
        )
    listed = (
        f"{', '.join(own)}, the presets {', '.join(presets.names())}, and any name of the notebook that holds an "
        "nbtrain.Strategy"
    )
    raise UsageError(f"{flag} {word.text}: there is no such strategy{which(word.plain, known, listed, most=2)}")


def strategies(flag: str, word: Word, notebook: Namespace) -> tuple[str, ...]:
    """`ddp,fsdp`; `all`: nbtrain's own."""
    if word.plain == ALL:
        return (ALL,)
    parts = [part.strip() for part in word.plain.strip("[]()").split(",") if part.strip()]
    if not parts:
        raise takes(flag, word, f"strategies and presets, as in {flag} ddp,fsdp, or {ALL}")
    return tuple(dict.fromkeys(strategy(flag, Word(part), notebook) for part in parts))
