"""Tries one cell in one way: sends it to the ranks, runs some steps, has the ranks forget it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.machine.host as host
from nbtrain.annexes.planning.auto_strategy import advise
from nbtrain.base.errors import CannotTravel, CellSyntaxError, MissingName, NbtrainError, UsageError
from nbtrain.base.specs import RunSpec, Trial
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.pool.pool_manager import PoolManager
from nbtrain.notebook.run.cell_run import CellRun
from nbtrain.notebook.run.discard_trial import DiscardTrial
from nbtrain.notebook.sync.captured_names import captured

ROOM = 0.9
"""share of the machine's free memory that the ranks of a trial may take together"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWay:
    """One way to run a cell."""

    name: str
    """`fsdp`"""
    line: str
    """the options, as they are typed"""
    spec: Callable[[], RunSpec]
    """raises UsageError where this cannot be run here"""
    keeps_name: bool = False
    """else `auto` gets the name of the strategy that it chose"""


class NothingToMeasure(UsageError):
    """The cell takes no optimizer step, whatever the way it is tried in."""


class Attempt:
    """Tries one cell. Nothing comes home, and other cells are not affected."""

    def __init__(self, shell: Any, ranks: PoolManager, cell: Cell, memory: int) -> None:
        """`memory`: bytes that a rank may take; 0: what the device has."""
        self._shell = shell
        self._ranks = ranks
        self._cell = cell
        self._memory = memory
        self._fresh = False
        """the ranks have nothing of the notebook's"""

    def try_out(self, way: RunWay, trial: Trial) -> dict[str, Any]:
        """What was measured, as changes of a `MeasuredWay`. Raises what every other way would raise, too."""
        try:
            spec = self.spec_of(way)
            home, spec = self.play(spec, trial)
            told = _told(home, spec, self._memory)
            return {**told, "name": spec.strategy} if spec.chosen and not way.keeps_name else told
        except (CannotTravel, MissingName, CellSyntaxError, NothingToMeasure):
            raise
        except NbtrainError as error:
            self._fresh = self._ranks.pool is None
            return {"state": "failed", "why": str(error).split("\n")[0]}

    def spec_of(self, way: RunWay) -> RunSpec:
        """The RunSpec of a trial; raises where it cannot be run."""
        spec = way.spec()
        if spec.pool.engine == "inprocess":
            raise UsageError("--engine inprocess has no ranks: leave it out, and the cell is tried on some")
        names = self.reads(spec)
        return _bare(advise(names, self._shell.user_ns, spec, self._ranks.pids, keep=False)[0])

    def play(self, spec: RunSpec, trial: Trial) -> tuple[DiscardTrial, RunSpec]:
        """Run the trial; returns how it ended, and what was run."""
        self._have(spec)
        spec = replace(spec, trial=replace(trial, memory=self._limit(spec)))
        names = self.reads(spec)
        run = CellRun(self._shell, self._ranks, spec, self._cell, names)
        run.run()
        assert isinstance(run.home, DiscardTrial)
        return run.home, spec

    def check(self, name: str) -> None:
        """Raises what every way would raise. `name`: a name that the cell has to read; may be empty."""
        names = self.reads()
        if name and name not in (*names.hard, *names.soft):
            raise UsageError(
                f"the cell does not read {name}, so it is the same with every value of it: let the cell make its "
                f"model with {name}"
            )

    def batch(self) -> int:
        """The batch size of the cell's loader; 0: there is none, or it does not say."""
        from torch.utils.data import DataLoader

        names = self.reads()
        held = (self._shell.user_ns[name] for name in (*names.hard, *names.soft))
        sizes = (getattr(one.batch_sampler, "batch_size", None) for one in held if isinstance(one, DataLoader))
        return next((size for size in sizes if isinstance(size, int) and size), 0)

    def reads(self, spec: RunSpec | None = None) -> Captured:
        namespace = self._shell.user_ns
        return captured(self._cell, namespace, NameOrder(namespace), spec)

    def _have(self, spec: RunSpec) -> None:
        """Start the right ranks, or have those that run forget everything."""
        ranks = self._ranks
        before = ranks.pool
        ranks.have(spec.pool)
        if ranks.pool is not before:
            ranks.wait_until_ready()
        elif not self._fresh:
            ranks.forget()
        self._fresh = True

    def _limit(self, spec: RunSpec) -> int:
        """The memory limit of a rank. On a CPU the rank gets an error before the system would kill it."""
        if self._memory or spec.pool.kind != "cpu":
            return self._memory
        return int(ROOM * host.memory().available / spec.pool.world_size)


def _bare(spec: RunSpec) -> RunSpec:
    """The same without options that write or show something."""
    return replace(
        spec, background=False, keep=(), save_steps=None, save_seconds=None, resume=None, monitor="off", log_to="",
        output="rank0",
    )  # fmt: skip


def _told(home: DiscardTrial, spec: RunSpec, asked: int) -> dict[str, Any]:
    """What was measured. `asked`: the user's limit, which the system does not apply to memory mapped before."""
    found = home.tried
    ranks = spec.pool.world_size
    if not found:
        return {"state": "failed", "ranks": ranks, "why": home.why or "it was cut short", "no_memory": home.no_memory}
    memory = tuple(one.memory for one in found)
    seconds = max(one.seconds for one in found)
    steps = min(one.steps for one in found)
    if 0 < asked < max(memory):
        why = f"out of memory: it took {humanize.size(max(memory))}"
        return {"state": "failed", "ranks": ranks, "memory": memory, "why": why, "no_memory": True}
    assert spec.trial is not None
    if not steps and spec.trial.batch == 1.0:
        raise NothingToMeasure("nothing to measure: the cell takes no optimizer step")
    if not steps:  # the data is less than a batch
        why = "the cell takes no optimizer step with it"
        return {"state": "failed", "ranks": ranks, "memory": memory, "why": why}
    return {
        "state": "done",
        "why": f"the loop was over after {steps} timed steps" if steps < spec.trial.steps else "",
        "ranks": ranks,
        "memory": memory,
        "steps": steps,
        "steps_per_second": steps / seconds,
        "samples_per_second": sum(one.samples for one in found) / seconds,
        "step": max(one.median for one in found),
        "batch": found[0].batch,
        "grown": all(one.grown for one in found),
    }
