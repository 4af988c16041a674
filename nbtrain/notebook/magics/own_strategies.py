"""Checks, in the kernel, strategies that are not nbtrain's: written in a cell, or from another package.

What only shows while they run is checked there: `worker/setup/components.py`, `worker/data/batch_dealing.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.strategies.base import Strategy

SIGNATURES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "__init__": ((None, None), "(self, options), and to call super().__init__(options)"),
    "set_up": ((None, None, "32"), "(self, component, precision)"),
}
"""method → arguments that it is called with, and how to write its signature"""


def is_strategy(value: object) -> bool:
    """Whether `-s` takes it: a class below Strategy, or an object of one."""
    return isinstance(value, Strategy) or (isinstance(value, type) and issubclass(value, Strategy))


def of_notebook(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """name → class or object. nbtrain's own classes, imported to be subclassed, are left out."""

    def is_own(value: object) -> bool:
        return is_strategy(value) and not (isinstance(value, type) and value.__module__.startswith("nbtrain."))

    return {name: value for name, value in namespace.items() if not name.startswith("_") and is_own(value)}


def says(value: Any) -> str:
    """What it says of itself: the first line of its docstring, or nothing."""
    cls = value if isinstance(value, type) else type(value)
    return (vars(cls).get("__doc__") or "").strip().split("\n")[0]


def checked(value: Any, where: str) -> type[Strategy]:
    """The class; raises if it cannot be used. `where` begins the error's sentence."""
    if not is_strategy(value):
        raise UsageError(f"{where} is {kind_of(value)}, which is not a subclass of nbtrain.Strategy")
    cls: type[Strategy] = value if isinstance(value, type) else type(value)
    if cls is Strategy:
        raise UsageError(
            f"{where} is nbtrain.Strategy itself, which lets every rank train a model of its own: write a class of "
            "yours on it, or take -s ddp; -s none leaves everything alone"
        )
    if not (isinstance(cls.Options, type) and is_dataclass(cls.Options)):
        raise UsageError(
            f"{cls.__name__}.Options has to be a dataclass: write @dataclass(frozen=True, kw_only=True) above it"
        )
    for name, (given, written) in SIGNATURES.items():
        if not _takes(getattr(cls, name), given):
            raise UsageError(f"{cls.__name__}.{name} has to take {written}")
    return cls


def check_options(cls: type[Strategy], options: Mapping[str, Any]) -> None:
    """Raises unless everything without a default is given, and the class takes the values."""
    lacking = [
        option.name
        for option in fields(cls.Options)
        if option.init
        and option.default is MISSING
        and option.default_factory is MISSING
        and option.name not in options
    ]
    if lacking:
        flags = " and ".join("--" + name.replace("_", "-") for name in lacking)
        raise UsageError(f"{cls.__name__} needs {flags}, for its Options give no default; write it behind -s")
    try:
        cls.Options(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{cls.__name__}.Options: {error}") from None


def kind_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _takes(function: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True
