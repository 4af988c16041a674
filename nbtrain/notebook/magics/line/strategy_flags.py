"""A strategy's own options as flags: each field of its `Options` is one. `bucket_mb: int` is `--bucket-mb 25`."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.options import BY_FLAG
from nbtrain.notebook.magics.line.split_line import Word
from nbtrain.notebook.magics.line.suggestions import similar
from nbtrain.notebook.magics.line.values import SWITCH, Namespace, Unreadable, evaluate


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One field of a strategy's options."""

    field: str
    type: Any
    default: Any
    """`...` where there is none"""

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(value) for value in typing.get_args(self.type)) if _is_literal(self.type) else ()

    @property
    def kind(self) -> str:
        """What the manual calls its type."""
        return "|".join(self.choices) or getattr(self.type, "__name__", str(self.type).replace("typing.", ""))


def flags_of(strategy: type[Any]) -> dict[str, Flag]:
    """`--bucket-mb` → Flag; where a field is a bool, `--no-bucket-view`, too."""
    options: Any = strategy.Options
    try:
        hints = typing.get_type_hints(options)
    except NameError:  # a type that is imported for type checkers only; then any value will do
        hints = {}
    by_flag: dict[str, Flag] = {}
    for option in fields(options):
        flag = Flag(field=option.name, type=hints.get(option.name, Any), default=_default(option))
        if flag.flag in BY_FLAG:
            raise UsageError(
                f"{strategy.__name__}.Options.{option.name} cannot be a flag, because {flag.flag} means something "
                f"else under every strategy; give the field another name"
            )
        by_flag[flag.flag] = flag
        if flag.type is bool:
            by_flag["--no-" + flag.flag[2:]] = flag
    return by_flag


def by_field(strategy: type) -> dict[str, Flag]:
    """Each flag once, by the field that it sets."""
    return {flag.field: flag for flag in flags_of(strategy).values()}


def read(typed: str, word: Word | None, flag: Flag, notebook: Namespace) -> Any:
    """The value of one of the strategy's own flags, of the type that its field has."""
    if flag.type is bool:
        value = True if word is None else SWITCH.get(word.plain.lower())
        if value is None:
            assert word is not None
            raise UsageError(f"{typed} {word.text}: {typed} is a switch; write {typed} or --no-{flag.flag[2:]}")
        return value if typed == flag.flag else not value
    if word is None:
        raise UsageError(f"{typed} needs a value ({flag.kind})")
    wrong: Unreadable | None = None
    if word.plain not in flag.choices:
        try:
            return _fit(evaluate(word.text, notebook), flag.type)
        except Unreadable as error:
            wrong = error
    try:
        return _fit(word.plain, flag.type)
    except Unreadable:
        hint = similar(word.plain, flag.choices)
        reason = f"; {wrong}" if wrong is not None and not flag.choices else ""
        raise UsageError(f"{typed} {word.text}: {typed} takes {flag.kind}{hint}{reason}") from None


def _fit(value: Any, kind: Any) -> Any:
    """The value converted to the field's type; raises Unreadable where it cannot be."""
    origin = typing.get_origin(kind)
    if kind is Any or isinstance(kind, str | typing.TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if type(value) in kinds:  # a float stays one where a field takes both
            return value
        for single in kinds:
            try:
                return _fit(value, single)
            except Unreadable:
                continue
        raise Unreadable(f"{_short(value)} is none of {kind}")
    if _is_literal(kind):
        for choice in typing.get_args(kind):
            if value == choice or value == str(choice):
                return choice
        raise Unreadable(f"{_short(value)} is not among the choices")
    wanted = type(None) if kind is None else origin or kind
    if wanted in (tuple, list, set, frozenset):
        # `--wrap Block` and `--wrap Block,Head` are what people write for a set of classes
        return wanted(value if isinstance(value, tuple | list | set | frozenset) else (value,))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 2e8
    if not isinstance(wanted, type):
        return value
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is int):
        raise Unreadable(f"{_short(value)} is not of type {wanted.__name__}")
    return value


def _short(value: Any) -> str:
    """Its repr if that is short, else its type."""
    shown = repr(value)
    return shown if len(shown) < 60 and "\n" not in shown else f"what it holds, {type(value).__name__},"


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _default(option: Field[Any]) -> Any:
    if option.default is not MISSING:
        return option.default
    return option.default_factory() if option.default_factory is not MISSING else ...
