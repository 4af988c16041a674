"""Is what ranks made of a program right, refused in words, or wrong? And which of its edits does that take?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nbtrain.machine import registry
from tests.fuzz.held import Held, differences
from tests.fuzz.player import Played, Player, Raised
from tests.fuzz.training import Program

Word = Literal["right", "refused", "said", "wrong", "no program"]

REFUSALS = ("NotSupported", "UsageError", "NotPrepared", "CannotTravel", "DeviceError", "MissingName")
"""Errors of ours by which a cell is refused; the others say that something broke."""
NAMED = re.compile(
    rf"(?i)(--strategy|-s|under|with|the strategy) ({'|'.join(registry.STRATEGIES)})\b|\b(write|leave|use)\b"
)
LONG = 900
"""characters of more than a sentence"""
ORDINARY = re.compile(
    r"(?m)^(\w+ · .*|values differ across ranks: .*|ranks? [\d, ]+ (printed|said) .*|\s*|rank \d+ of .*|"
    r".*: starting .*|starting .*|a number of each rank's own .*|"
    r"new ranks, because of .*|nbtrain: step .* of the failed cell .*|.*Warning: .*|  .*|.* stays on the ranks, .*)$"
)
"""What a cell shows beside sentences that say why its numbers are not those of one process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    word: Word
    why: str = ""
    """the sentence, or where the numbers are apart"""

    @property
    def kind(self) -> str:
        """The same for two failures of one cause, as far as a text can tell."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.why.split("\n")[0])
        text = re.sub(r"\[?'?[\w.]*\d+'?\]?(\.\w+)*", "#", text)
        return f"{self.word}: {re.sub(r'#[# .,0-9e-]*', '#', text)[:160]}"


class Oracle:
    """One process, and what rounding alone makes of a program in it."""

    def __init__(self) -> None:
        self.player = Player("")
        self._played: dict[tuple[tuple[bool, str], ...], tuple[list[Played], list[Played]]] = {}

    def __enter__(self) -> Oracle:
        self.player.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.player.close()

    def play(self, program: Program) -> tuple[list[Played], list[Played]]:
        return self.player.play(program.text), self.player.play(program.text, nudged=True)

    def recall(self, cells: list[tuple[bool, str]]) -> tuple[list[Played], list[Played]]:
        """The same for cells that several strategies play: one process plays them once."""
        key = tuple(cells)
        if key not in self._played:
            self._played[key] = self.player.play(cells), self.player.play(cells, nudged=True)
        return self._played[key]


def judge(alone: list[Played], nudged: list[Played], ranks: list[Played]) -> Verdict:
    for number, cell in enumerate(alone):
        if number >= len(ranks):
            return Verdict("wrong", f"cell {number + 1} was not reached")
        other = ranks[number]
        if cell.error is not None:
            return _both_failed(cell.error, other)
        if other.hung:
            return Verdict("wrong", "the cell hangs, or its process died")
        if other.error is not None:
            return _failed(other.error)
        unsteady: Held | None = nudged[number].held if number < len(nudged) else None
        if lines := differences(cell.held, other.held, unsteady):
            return _apart(lines, ranks[: number + 1])
        if "differs from rank" in other.shown:
            return Verdict("said", "the numbers are right, and the cell says: " + _said(other.shown))
    return Verdict("right")


def _both_failed(wanted: Raised, other: Played) -> Verdict:
    if other.hung:
        return Verdict("wrong", f"hangs, where one process raises {wanted.name}")
    if other.error is None:
        return Verdict("wrong", f"raises nothing, where one process raises {wanted.name}: {wanted.text:.150}")
    if other.error.name == wanted.name or wanted.name in other.error.bases:
        return Verdict("no program")
    refused = _failed(other.error)
    if refused.word == "refused":
        return refused
    return Verdict("wrong", f"{refused.why}\n(one process: {wanted.name}: {wanted.text:.150})")


def _failed(error: Raised) -> Verdict:
    text = f"{error.name}: {error.text}"
    in_words = "NbtrainError" not in error.bases and "strategy" in text and NAMED.search(error.text)
    if (error.name in REFUSALS or in_words) and len(error.text) <= LONG:
        return Verdict("refused", text)
    return Verdict("wrong", f"a bare error: {text:.1500}")


def _apart(lines: list[str], played: list[Played]) -> Verdict:
    said = " | ".join(filter(None, (_said(cell.shown) for cell in played if cell.distributed)))
    where = "\n".join(lines[:12]) + (f"\n… and {len(lines) - 12} more" if len(lines) > 12 else "")
    return Verdict("said", f"{said}\n{where}") if said else Verdict("wrong", where)


def _said(shown: str) -> str:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    return " ".join(ORDINARY.sub("", shown).split())[:600]


def shrunk(program: Program, still: Callable[[Program], bool], tries: int = 25) -> Program:
    """Left out is whatever the failure does not need, one thing after another."""
    ahead = True
    while ahead and tries > 0:
        ahead = False
        for simpler in program.simpler():
            tries -= 1
            if tries < 0:
                break
            if still(simpler):
                program, ahead = simpler, True
                break
    return program
