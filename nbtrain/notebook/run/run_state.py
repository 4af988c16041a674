"""One run of a cell: what was asked, what is known of it so far, and commands for it from outside the cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.events import Memory
from nbtrain.base.keyboard_interrupts import Presses
from nbtrain.base.specs import RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.output.rank_output import Relay
from nbtrain.notebook.pool.pool_manager import PoolManager
from nbtrain.notebook.run.run_outcome import Outcome
from nbtrain.notebook.run.stop_ranks import StopRanks

COMMANDS = ("stop", "stacks", "kill")

OVER = "This run is over."
HOMEWARD = "The ranks have ended; what they did comes home as soon as the notebook is idle."

Answer = tuple[bool, str]
"""whether the command is carried out, and a sentence"""


@dataclass(eq=False, repr=False)
class RunState:
    """What `CellRun` shares with its controls and with what brings its work home."""

    shell: Any
    ranks: PoolManager
    spec: RunSpec
    cell: Cell
    names: Captured
    outcome: Outcome
    relay: Relay
    number: int = 0
    """the ranks' number of this run"""
    weights_folder: str = ""
    """where the ranks put their weights when the notebook reads them"""
    memory: dict[int, Memory] = field(default_factory=dict)
    """the last reading of each rank"""
    presses: Presses = field(default_factory=Presses)
    ending: StopRanks | None = None
    """once the ranks have been sent the cell"""
    growing: bool = False
    """it was stopped to take in a machine"""
    homeward: bool = False
    """its ranks have ended, and what they did waits until the notebook is idle"""
    over: bool = True
    """no rank runs the cell, or those that did are gone"""

    @property
    def stopped(self) -> bool:
        return self.ending is not None and self.ending.stopped

    @property
    def runs_as(self) -> tuple[Any, ...]:
        return self.spec.strategy, dict(self.spec.options), self.spec.precision

    @property
    def open(self) -> set[int]:
        """Ranks that have not ended, and live."""
        return self.outcome.silent - self.ranks.gone

    @property
    def fault(self) -> bool:
        """Whether a rank failed or died, other than by Stop."""
        return bool(self.ranks.deaths) or self.outcome.fault

    @property
    def killed(self) -> bool:
        """Whether Stop was pressed a second time, or Kill: no rank is waited for any more."""
        return self.presses.count > 1

    @property
    def quiet(self) -> bool:
        """Whether the process group can be used again."""
        gave_up = self.ending is not None and self.ending.gave_up
        return self.outcome.quiet() and self.outcome.grouped and (not gave_up or self.spec.pool.world_size == 1)

    def once_shown(self, do: Callable[[], None]) -> None:
        """Call `do` when the notebook's cell is over."""

        def over(*_: Any) -> None:
            self.shell.events.unregister("post_execute", over)
            do()

        self.shell.events.register("post_execute", over)


class RunControls:
    """The `views.base.Controls` of one run: for the dashboard's buttons, the server, other threads. `do` may be
    called from any thread, and repeated."""

    def __init__(self, run: RunState) -> None:
        self._run: RunState | None = run

    def close(self) -> None:
        """The run is over; buttons that are still shown must not keep it alive."""
        self._run = None

    @property
    def over(self) -> bool:
        """Whether its ranks have ended."""
        run = self._run
        return run is None or run.over or run.homeward or not run.ranks.running

    def earlier(self) -> list[dict[str, Any]]:
        from nbtrain.watch.runs.earlier_runs import earlier_runs

        return earlier_runs()

    def curves(self, run: int) -> dict[str, dict[str, Any]]:
        from nbtrain.watch.runs.earlier_runs import mean_curves

        return mean_curves(run)

    def do(self, command: str) -> Answer:
        run = self._run
        if command not in COMMANDS:
            return False, f"there is no command {command!r}; there are {', '.join(COMMANDS)}"
        if run is None or self.over:
            return False, HOMEWARD if run is not None and run.homeward and not run.killed else OVER
        if command == "stacks":
            return True, "\n".join(run.ranks.where())
        if command == "kill":
            run.presses.count = max(run.presses.count, 2)
            run.presses.wake()
            return True, "the ranks are ended; the notebook is as it was before the run"
        again = run.presses.count
        run.presses.ask()
        if again:
            return True, "it is stopping already; Kill ends the ranks at once"
        return True, "stopping at the end of this step; the weights come home"
