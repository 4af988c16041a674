"""Commands for a run from outside its cell: a button of the dashboard, the server's page, another thread."""

from __future__ import annotations

from typing import Any

from nbtrain.notebook.run.run_state import RunState
from nbtrain.watch.runs.earlier_runs import earlier_runs, mean_curves

COMMANDS = ("stop", "stacks", "kill")

OVER = "This run is over."
HOMEWARD = "The ranks have ended; what they did comes home as soon as the notebook is idle."

Answer = tuple[bool, str]
"""whether the command is carried out, and a sentence"""


class RunControls:
    """The `views.base.Controls` of one run. `do` may be called from any thread, and repeated."""

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
        return earlier_runs()

    def curves(self, run: int) -> dict[str, dict[str, Any]]:
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
