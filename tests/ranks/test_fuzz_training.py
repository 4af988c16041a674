"""Random training programs end on ranks as in one process, or are refused in a sentence.

A few programs of a seed that is the day's, on one notebook whose ranks change their strategy from program to program.
SEED=738000 plays those of another day; `make fuzz STRATEGY=fsdp EXAMPLES=1000 SEED=0` plays more, and makes what fails
small.
"""

from __future__ import annotations

import datetime
import os
import time
from importlib.util import find_spec

import pytest
import torch

from nbtrain.machine import registry
from tests.fuzz.__main__ import STRATEGIES, left_out, suited
from tests.fuzz.architectures import ARCHITECTURES
from tests.fuzz.common_edits import LINE
from tests.fuzz.edits import KINDS
from tests.fuzz.loops import LOOPS, OPTIMIZERS
from tests.fuzz.player import Played, Player, Raised
from tests.fuzz.training import draw
from tests.fuzz.verdicts import Oracle, judge

SEED = int(os.environ.get("SEED") or datetime.date.today().toordinal())
SECONDS = 45.0
OPEN = 0.15
"""So large a part may be wrong, until what docs/edits.md calls wrong is mended; this only goes down."""
IN_A_ROW = 3
"""so many programs under one strategy, on ranks that are warm then"""
HERE = [
    name for name in STRATEGIES if all(map(find_spec, registry.strategy(name.split("_")[0]).needs.packages))
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_random_trainings_are_right_or_refused() -> None:
    until, number, failures, played = time.monotonic() + SECONDS, 0, [], 0
    with Oracle() as oracle, Player("ddp") as ranks:
        while time.monotonic() < until and number < 200:
            ranks.strategy = HERE[number // IN_A_ROW % len(HERE)]
            program = suited(draw(SEED, number), ranks.strategy)
            number += 1
            if left_out(program, ranks.strategy):
                continue
            found = judge(*oracle.play(program), ranks.play(program.text))
            played += 1
            if found.word == "refused" and LINE in found.why:
                program = program.with_whole()
                found = judge(*oracle.play(program), ranks.play(program.text))
            if found.word == "wrong":
                again = f"make fuzz STRATEGY={ranks.strategy} SEED={SEED} NUMBER={number - 1}"
                failures.append(f"{again}\n{found.why}\n\n{program}")
    assert played >= 5
    assert len(failures) <= OPEN * played, f"{len(failures)} of {played} programs\n" + "\n\n".join(failures)


# --- the machinery -------------------------------------------------------------------------------


def test_a_program_is_its_seed_and_number() -> None:
    assert str(draw(3, 17)) == str(draw(3, 17)) != str(draw(3, 18))
    assert str(draw(3, 17)) != str(draw(4, 17))


def test_programs_are_python_and_have_every_edit_loop_and_architecture() -> None:
    programs = [draw(1, number) for number in range(1500)]
    for program in programs:
        for _, code in program.text:
            compile(code, "<cell>", "exec")
    edits = {edit.edit for program in programs for cell in program.cells for edit in cell.edits}
    assert {edit.name for _, kind in KINDS for edit in kind} == edits
    assert {program.architecture for program in programs} == set(ARCHITECTURES)
    assert {cell.loop for program in programs for cell in program.cells} == set(LOOPS)
    assert {program.optimizer for program in programs} == {*OPTIMIZERS, ""}


def cell(held: dict | None = None, error: Raised | None = None, shown: str = "", hung: bool = False) -> Played:
    return Played("", True, error, shown, held or {}, hung)


ONE = {"model.w": torch.ones(2)}
OFF = {"model.w": torch.ones(2) + 0.01}
REFUSED = Raised("NotSupported", ("NotSupported", "NbtrainError"), "fsdp cannot do that: write --strategy ddp")
BARE = Raised("KeyError", ("KeyError",), "1405")
BANNER = "ddp · 2 ranks · cpu · batch 4 × 2\nvalues differ across ranks: x, y; kept rank 0's\n"


@pytest.mark.parametrize(
    ("alone", "ranks", "word"),
    [
        (cell(ONE), cell(ONE), "right"),
        (cell(ONE), cell({"model.w": torch.ones(2) + 1e-6}), "right"),
        (cell(ONE), cell(OFF), "wrong"),
        (cell(ONE), cell(OFF, shown=BANNER), "wrong"),
        (cell(ONE), cell(OFF, shown=BANNER + "weights are drawn by each rank for itself"), "said"),
        (cell(ONE), cell({}), "wrong"),
        (cell(ONE), cell(error=REFUSED), "refused"),
        (cell(ONE), cell(error=BARE), "wrong"),
        (cell(ONE), cell(hung=True), "wrong"),
        (cell(error=BARE), cell(error=BARE), "no program"),
        (cell(error=BARE), cell(error=REFUSED), "refused"),
        (cell(error=BARE), cell(ONE), "wrong"),
    ],
)
def test_a_verdict(alone: Played, ranks: Played, word: str) -> None:
    assert judge([alone], [alone], [ranks]).word == word
