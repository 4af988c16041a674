"""What a verb of `%distributed` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verb:
    usage: str
    do: Callable[[Any, Any], str | None] | str
    """runs the verb, with the state of the magics and what was typed, and returns what to print; one of an annex is
    named, and loaded when it is used"""
    help: str
    _: KW_ONLY
    options: bool = False
    """it takes the options that decide which processes there are"""
    takes: tuple[str, ...] = ()
    """names of other options that it takes"""
    names: bool = False
    """it takes names of the notebook"""
    own: bool = False
    """it has options of its own"""

    def has(self, option: Any) -> bool:
        """`option`: an `Option` of the line."""
        return (self.options and option.pool) or option.name in self.takes
