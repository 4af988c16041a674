"""The notebook's model, and the cell that trains it, as the picker plans and measures them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbtrain.annexes.planning import plan_verb
from nbtrain.annexes.planning.plan.guide import GOALS
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.annexes.planning.trials import compare_trials, trial_options, verify_cell
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PRECISIONS
from nbtrain.notebook.magics import cells
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.annexes.planning.compare.comparison import Comparison
    from nbtrain.annexes.planning.compare.receipt import Receipt
    from nbtrain.notebook.cell import Cell

STEPS = 10
"""steps that are measured of each"""
NO_MODEL = (
    "No model yet: make an nn.Module and a batch or a DataLoader for it, then %distributed pick shows what each "
    "strategy needs."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What a plan depends on."""

    devices: str
    """as it is typed behind --devices"""
    batch: int | None = None
    """samples of a rank's batch; None: as many as the notebook's has"""
    precision: str = PRECISIONS[0]
    goal: str = GOALS[0]
    loss: str = "any"


class NotebookModel:
    """The notebook's model, and the cell that trains it, as the picker needs them."""

    def __init__(self, state: MagicsState, model: str, request: Request) -> None:
        self._state = state
        self._model = model
        self._request = request
        self._loop = ""
        """a training loop for the model, for when no cell was run"""

    def plan(self, settings: PlanSettings) -> Plan:
        """Raises a UsageError that says what is missing where there is nothing to plan for."""
        if "torch" not in sys.modules:
            raise UsageError(NO_MODEL)
        from nbtrain.annexes.planning.picker.training_loop import loop, resized  # on use: torch
        from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch

        state = self._state
        base = self._request.over(state.defaults)
        found = find_model_and_batch(state.notebook, self._model, base.value("batch"))
        self._loop = loop(found, state.notebook)
        if settings.batch is not None:
            found = replace(found, batch=resized(found.batch, settings.batch))
        wanted = state.read(f"--devices {settings.devices} --precision {settings.precision}").over(base)
        return plan_verb.plan_of(found, state.notebook, wanted, plan_verb.ranks_of(state), settings.goal, settings.loss)

    def cell(self) -> str:
        """What `measure` would run, in words."""
        last = self._state.last_cell
        if last is not None:
            number = f" [{last.number}]" if last.number is not None else ""
            return f"Measure and Verify run {STEPS} steps of the last cell{number}."
        if self._loop:
            return f"Measure runs {STEPS} steps of forward, backward and step, or of the last %%distributed cell."
        return "Measure needs a loop: run a %%distributed cell first."

    def measure(
        self, candidates: Sequence[tuple[str, str]], goal: str, told: Callable[[Comparison], None]
    ) -> Comparison:
        """`candidates`: name and line of each. `goal`: `speed`, or `batch` to look for the largest."""
        cell, state = self._cell(), self._state
        ways = [trial_options.way(state, name, state.read(line), state.defaults) for name, line in candidates]
        question = compare_trials.Question(goal=goal, steps=STEPS, memory=self._request.value("memory"))
        return compare_trials.compare(state.opened(), ways, cell, question, told)

    def verify(self, name: str, line: str, told: Callable[[Receipt], None]) -> Receipt:
        """Compare the line with one process."""
        cell, state = self._cell(), self._state
        way = trial_options.way(state, name, state.read(line), state.defaults)
        return verify_cell.verify(state.opened(), way, cell, STEPS, told)

    def _cell(self) -> Cell:
        if self._state.last_cell is not None:
            return self._state.last_cell
        if not self._loop:
            raise UsageError("There is no loop to measure: run a %%distributed cell first.")
        return cells.locate(self._state.shell, "distributed", "", self._loop, None)
