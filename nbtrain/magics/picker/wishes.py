"""What the user of a picker asks for besides the strategy, and what a picker needs of the notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbtrain.errors import UsageError
from nbtrain.magics.line.parse import Request
from nbtrain.planning.compare.comparison import Comparison
from nbtrain.planning.compare.receipt import Receipt
from nbtrain.planning.plan.guide import GOALS
from nbtrain.planning.plan.plan import Plan
from nbtrain.specs import PRECISIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a plan depends on."""

    devices: str
    """as it is typed behind --devices"""
    batch: int | None = None
    """samples of a rank's batch; None: as many as the notebook's has"""
    precision: str = PRECISIONS[0]
    goal: str = GOALS[0]
    loss: str = "any"


class Backing(Protocol):
    """What a picker needs of the notebook."""

    def plan(self, wish: Wish) -> Plan:
        """Raises a UsageError that says what is missing where there is nothing to plan for."""

    def cell(self) -> str:
        """What `measure` would run, in words."""

    def measure(
        self, candidates: Sequence[tuple[str, str]], goal: str, told: Callable[[Comparison], None]
    ) -> Comparison:
        """Name and line of each. `goal`: `speed`, or `batch` to look for the largest."""

    def verify(self, name: str, line: str, told: Callable[[Receipt], None]) -> Receipt:
        """Compare the line with one process."""


def devices_of(defaults: Request, running: int | None, count: int) -> str:
    """The value of `--devices` to begin with, as it is typed."""
    if "devices" in defaults.given and not defaults.value("devices").chosen_by_us:
        return defaults.given["devices"].typed.partition(" ")[2]
    return str(running or count)


def ranks_of(typed: str, count: int) -> int:
    """How many ranks `4`, `"0,2"`, `free:2` and `-1` are."""
    text = typed.strip("\"'")
    if text == typed and text.isdecimal():
        return max(1, int(text))
    if text.startswith("free:"):
        return int(text[5:])
    if text in ("-1", "auto"):
        return count
    return max(1, len([part for part in text.strip("[]()").split(",") if part.strip()]))


def whole(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UsageError(f"{name} is a whole number, 1 or more, not {value!r}")
    return number
