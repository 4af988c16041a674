"""Whether a cell gives under its strategy what one process gives: plain data, and how it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.base import tables

SHOWN = 10
"""losses and weights that a table shows"""
EQUAL, EXPECTED, DIFFERS, FAILED, UNKNOWN = "equal", "expected", "differs", "failed", "not compared"
"""EXPECTED: it differs by dropout or batch norm alone, as it does on several ranks"""
SIGNS = {EQUAL: "✓", EXPECTED: "≈", DIFFERS: "✗", FAILED: "✗", UNKNOWN: "?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDifference:
    """How far a tensor of the model is from what one process has."""

    name: str
    difference: float
    """the largest between ranks and one process"""
    moved: float
    """the largest change that the steps made in one process"""
    allowed: float
    """the difference that rounding explains"""

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed  # False for NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """What a name of the cell holds when the steps are over: each rank's, and one process's."""

    name: str
    ranks: tuple[float, ...]
    alone: float
    how: str
    """how the ranks' numbers make one process's: `sum`, `mean`, or empty where neither does"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What comparing one cell with one process has found."""

    line: str
    """the options, as they are typed"""
    strategy: str = ""
    ranks: int = 0
    steps: int = 0
    state: str = ""
    """EQUAL, EXPECTED, DIFFERS, FAILED or UNKNOWN; empty while it is being found out"""
    doing: str = ""
    """what is done meanwhile"""
    samples: str = ""
    """a sentence on which samples both have seen"""
    samples_agree: bool = True
    losses: tuple[tuple[float, float], ...] = ()
    """for each backward: the mean of the ranks' losses, and one process's"""
    weights: tuple[WeightDifference, ...] = ()
    numbers: tuple[Number, ...] = ()
    """names that hold a number of each rank's own"""
    causes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return bool(self.state)

    def data(self) -> dict[str, Any]:
        """For a front end."""
        return {"state": self.state, "text": repr(self)}

    def __repr__(self) -> str:
        return tables.blocks_text(_blocks(self))

    def _repr_html_(self) -> str:
        return tables.page(_blocks(self))


def _blocks(receipt: Receipt) -> Iterator[tables.Block]:
    if not receipt.over:
        yield f"{_title(receipt)} … {receipt.doing}"
        return
    yield _title(receipt)
    if rows := _rows(receipt):
        width = max(len(name) for name, _ in rows)
        yield "\n".join(f"{name.ljust(width)}  {said}" for name, said in rows)
    if receipt.losses:
        yield _losses(receipt.losses)
    if worst := _worst(receipt):
        yield _weights(worst)
    yield "\n".join([f"{SIGNS[receipt.state]} {_verdict(receipt)}", *receipt.causes])


def _title(receipt: Receipt) -> str:
    who = f"{receipt.strategy or receipt.line}"
    if not receipt.ranks:
        return f"{who} against one process"
    ranks = f"{receipt.ranks} rank{'s' * (receipt.ranks != 1)}"
    if not receipt.steps:
        return f"{who} on {ranks} against one process"
    return f"{who} on {ranks} against one process · {receipt.steps} step{'s' * (receipt.steps != 1)} of each"


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    found = []
    if receipt.samples:
        found.append(("samples", receipt.samples))
    if receipt.losses:
        worst = max(abs(a - b) for a, b in receipt.losses)
        found.append(("losses", f"{len(receipt.losses)} compared; largest difference {worst:.2g}"))
    if receipt.weights:
        worst_weight = max(receipt.weights, key=_share)
        found.append(
            (
                "weights",
                f"{len(receipt.weights)} compared; largest difference {worst_weight.difference:.2g}, in "
                f"{worst_weight.name}, which the steps changed by {worst_weight.moved:.2g}",
            )
        )
    found += [(number.name, _own(number)) for number in receipt.numbers]
    return found


def _own(number: Number) -> str:
    each = ", ".join(f"{value:.6g}" for value in number.ranks)
    said = f"{each} on the ranks, {number.alone:.6g} in one process"
    if number.how == "sum":
        return f'{said}: write {number.name} = reduce({number.name}, "sum") before it is shown'
    if number.how == "mean":
        return f"{said}: the ranks' mean is that number, reduce({number.name})"
    return said


def _share(weight: WeightDifference) -> float:
    """How far it is beyond what rounding explains; NaN is beyond everything."""
    if weight.difference != weight.difference:
        return float("inf")
    return weight.difference / weight.allowed if weight.allowed else weight.difference


def _worst(receipt: Receipt) -> list[WeightDifference]:
    """The weights that differ, the farthest first."""
    return sorted((one for one in receipt.weights if not one.equal), key=_share, reverse=True)[:SHOWN]


def _weights(worst: Sequence[WeightDifference]) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (one.name, f"{one.difference:.3g}", f"{one.moved:.3g}", f"{one.allowed:.1g}") for one in worst
    ]
    return ("weight", "difference", "change in the steps", "explained by rounding"), rows


def _losses(losses: Sequence[tuple[float, float]]) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (str(at + 1), f"{a:.6g}", f"{b:.6g}", f"{a - b:+.2g}") for at, (a, b) in enumerate(losses[:SHOWN])
    ]  # fmt: skip
    return ("backward", "the ranks' mean", "one process", "difference"), rows


def _verdict(receipt: Receipt) -> str:
    if receipt.state == EQUAL:
        return "equal: this strategy gives the same result as one process on the same samples"
    if receipt.state == EXPECTED:
        return "differs from one process as expected, and in nothing else"
    if receipt.state == DIFFERS:
        return "differs from one process on the same samples"
    if receipt.state == UNKNOWN:
        return "cannot be compared with one process"
    return "it failed"
