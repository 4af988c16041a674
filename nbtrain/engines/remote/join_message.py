"""A node's first words, as JSON: they are read before it is certain who speaks, and opening a pickle runs code."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from nbtrain.engines.remote.protocol import Join

MARK = b"nbtrain joins"
"""the part before the JSON"""


def written(join: Join) -> tuple[bytes, bytes]:
    """The parts of the frame that says this."""
    return MARK, json.dumps(join, default=_plain).encode()


def read(parts: Sequence[Any]) -> Join | None:
    """None where these parts are something else. Raises `ValueError` where that cannot be read."""
    if len(parts) != 2 or bytes(parts[0][: len(MARK) + 1]) != MARK:
        return None
    try:
        join = _made(Join, json.loads(bytes(parts[1])))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    assert isinstance(join, Join)
    return join


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value.hex() if isinstance(value, bytes) else str(value) if isinstance(value, Path) else sorted(value)


def _made(kind: Any, value: Any) -> Any:
    """`value`, which JSON has said, as one of this annotation's."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, types.UnionType):
        (other,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _made(other, value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        words = {field.name: _made(hints[field.name], value[field.name]) for field in fields(kind)}
        return cast("type[Any]", kind)(**words)
    if origin in (tuple, frozenset):
        return origin(_made(arguments[0], item) for item in value)
    if origin is Mapping:
        return {_made(arguments[0], key): _made(arguments[1], item) for key, item in value.items()}
    if kind is bytes:
        return bytes.fromhex(value)
    if kind is Path:
        return Path(value)
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value
