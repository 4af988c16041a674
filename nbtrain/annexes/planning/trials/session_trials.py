"""Trials on the ranks of a notebook's session, one at a time; the notebook stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.compare.receipt import Receipt
from nbtrain.annexes.planning.trials.attempt import Attempt, RunWay
from nbtrain.annexes.planning.trials.compare_trials import Comparing, Question, Told
from nbtrain.annexes.planning.trials.verify_cell import Verifying
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.session import Session


def compare(session: Session, ways: Sequence[RunWay], cell: Cell, question: Question, told: Told) -> Comparison:
    """Try the cell in these ways, one by one. `told` is called with each result."""
    with session.trial():
        return Comparing(Attempt(session.shell, session.ranks, cell, question.memory), question, ways, told).run()


def verify(session: Session, way: RunWay, cell: Cell, steps: int, told: Callable[[Receipt], None]) -> Receipt:
    """Run the first steps of the cell, and again as one process."""
    with session.trial(way.spec):
        return Verifying(Attempt(session.shell, session.ranks, cell, 0), way, steps, told).run()
