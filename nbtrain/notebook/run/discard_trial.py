"""Ends a trial: reads what it has measured, and lets the ranks forget it. The notebook is as it was."""

from __future__ import annotations

import signal
from collections.abc import Callable

from nbtrain.base.errors import PoolError
from nbtrain.base.events import Event, Failed, Tried
from nbtrain.engines.base import Death
from nbtrain.notebook.report.oom_report import ran_out
from nbtrain.notebook.run.bring_home import Homecoming
from nbtrain.notebook.run.run_state import RunState

EXITS = (1, 127)
"""exit codes of a process that could not start a thread, or load a library"""
LINE = 200
"""characters of an error's text in a table"""


class DiscardTrial(Homecoming):
    """Ends one trial."""

    def __init__(self, run: RunState, take: Callable[[Event], None]) -> None:
        super().__init__(run, take)
        self.why = ""
        """why it failed; empty if it did not"""
        self.no_memory = False
        """it failed for lack of memory"""

    @property
    def tried(self) -> list[Tried]:
        """What each rank has measured; nothing of a trial that failed."""
        figures = [done.tried for _, done in sorted(self.outcome.finished.items()) if done.tried is not None]
        return figures if len(figures) == len(self.outcome.ranks) and not self.why else []

    def end(self, ok: bool) -> None:
        ranks, run = self.ranks, self.run
        if not ok:
            self._read_failure()
        dead, stuck = ranks.gone, run.open
        sound = ok and all(done.grouped for done in self.outcome.finished.values())
        self.outcome.without(dead)
        try:
            self._replace(dead | stuck | self.outcome.lost_cards, sound or run.quiet)
            if ranks.pool is not None:
                ranks.forget()
        except PoolError:  # a rank takes no message
            ranks.lose()
        run.over = True
        if run.stopped:
            raise KeyboardInterrupt("stopped; the notebook is as it was before this cell")

    def _wanted_memory(self, death: Death) -> bool:
        """Whether lack of memory ended the process: code that gets no exception ends by a signal or an exit code."""
        if death.signal == signal.SIGKILL:
            return self.ranks.out_of_memory_kills
        return death.signal in (signal.SIGABRT, signal.SIGSEGV) or death.code in EXITS

    def _read_failure(self) -> None:
        deaths = self.ranks.deaths
        if deaths:
            self.no_memory = any(map(self._wanted_memory, deaths))
            self.why = str(deaths[0])
            return
        first = min(self.outcome.failed.values(), key=lambda failure: (failure.interrupted, failure.time), default=None)
        if first is not None:
            self.no_memory = any(ran_out(failed) for failed in self.outcome.failed.values())
            self.why = "out of memory" if self.no_memory else _short(first)


def _short(failed: Failed) -> str:
    line = " ".join(failed.text.split())
    line = line if len(line) < LINE else f"{line[:LINE]} …"
    return f"{failed.name}: {line}" if line else failed.name
