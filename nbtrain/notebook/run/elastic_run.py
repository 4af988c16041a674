"""`--nodes MIN:MAX`: a run that goes on when a machine is lost, and takes in one that joins.

What a survivor has after its last whole step comes home, as `recover` would bring it; ranks are started on the machines
that are there; and the cell goes on behind that step: its `resumable` loops know their places. Each step takes as many
batches as with the ranks that began, so that learning rates keep their meaning. Where models are in pieces a lost rank
takes its piece along: then the last checkpoint of the run is what is gone on from.

A machine that joins is taken in between two steps, in the same way, without any loss.

Each stretch is a run like any other, and ends in `GoesOn` where ranks change; the session begins the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.base.humanize import listed
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.engines.remote.resolve_machines import pool_spec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.machine import registry
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.report.cell_report import Reporter, drop_ahead, report
from nbtrain.notebook.run.bring_home import Homecoming
from nbtrain.notebook.run.elastic_cell import check_loops, cut
from nbtrain.notebook.run.run_error import run_error
from nbtrain.worker.checkpoints.newest import last_number, load_newest
from nbtrain.worker.data.batch_dealing import batches_of_a_step
from nbtrain.worker.loop.shared_board import OPEN, STEPS

LEFT = (
    " (what stands below optimizer.step() was not done for that step: what waits for other ranks belongs between "
    "backward() and step())"
)
TOGETHER = 1.0
"""Seconds for which a run waits for more machines once one has joined."""
AGAIN = 3
"""Beginnings without a step between them after which it is no machine's fault."""


class GoesOn(NbtrainError):
    """The ranks have changed: what came home is to be gone on from. Never seen by the user."""

    def __init__(self, why: str, steps: int, place: bytes | None, left: bool = False, *, lost: bool = True) -> None:
        super().__init__(why)
        self.lost = lost
        """a rank is, so that the others were cut short; else they have stopped between two steps"""
        self.steps = steps
        self.place = place
        """where the loops are; None: nothing was trained"""
        self.left = left
        """what stands below the last step was not done"""


class IsOver(NbtrainError):
    """A rank was lost after the cell had ended, and what it did is in the notebook. Never seen by the user."""


class ElasticHomecoming(Homecoming):
    """Ends a run whose machines come and go."""

    _ended: frozenset[int] = frozenset()
    """ranks that had come to the end of the cell by themselves"""
    _joined: Stopwatch | None = None
    """since when there is a machine that has no ranks"""

    def may_grow(self) -> bool:
        """Whether a machine has joined that may take part in this run, which trains already."""
        pool, machines = self.ranks.pool, self.spec.pool.machines
        full = machines is None or machines.most is None or self.spec.pool.nodes >= machines.most
        if full or pool is None or not pool.spare() or not all(map(self._steps, self.outcome.ranks)):
            self._joined = None
            return False
        self._joined = self._joined or Stopwatch()
        return self._joined.seconds > TOGETHER

    def _steps(self, rank: int) -> int:
        """Steps that this rank has ended, as the board tells."""
        assert self.ranks.pool is not None
        part = self.ranks.pool.board.parts[rank]
        return int(part[STEPS]) if abs(part[OPEN]) == self.run.number else 0

    def end(self, ok: bool) -> None:
        self._ended = frozenset(self.outcome.finished)
        try:
            super().end(ok)
        except IsOver as lost:
            self.ranks.lose()
            self.run.relay.say(f"nbtrain: {lost}; the cell had ended, and all it did is in the notebook")
        except KeyboardInterrupt:
            if not self.run.growing or self.run.presses.count:
                raise
            if self.outcome.lead in self._ended:  # a machine has joined as it ended
                return self.ranks.lose()
            self.ranks.gradients.there.clear()
            done = self.outcome.finished[self.outcome.lead]
            raise GoesOn("a machine has joined", done.steps, *done.place, lost=False) from None

    def _fail(self) -> NoReturn:
        deaths, dead = list(self.ranks.deaths), self.ranks.gone
        if not deaths or (self.run.stopped and not self.run.growing):
            super()._fail()
        self.outcome.without(dead)
        lead, why = self.outcome.best(), _lost(deaths)
        over = lead in self._ended
        if self.outcome.in_pieces or lead is None or not (over or self.outcome.steps):
            self.run.over = True
            drop_ahead(self._side)
            steps = self.outcome.steps
            raise GoesOn(why, steps, None) from run_error(self.run, self._side, self.run.open, "")
        if not self._conclude(lead, spare=True):
            self._fail()
        self.run.over = True
        with shielded():
            self._come_home()
        self.ranks.gradients.there.clear()  # of the batch that was cut short: it will have its backward again
        done = self.outcome.finished[lead]
        report(self._side, {lead: done}, lead, Reporter(self.run.relay.say, self.ranks.advised, self.run.cell))
        raise IsOver(why) if over else GoesOn(why, done.steps, *done.place)

    def _form_anew(self, anew: set[int]) -> None:
        """The next stretch has ranks of its own."""


def _lost(deaths: list[Any]) -> str:
    machines: dict[str, str] = {death.machine: death.said for death in deaths if death.machine}
    lost = [f"{name} is lost ({why})" for name, why in machines.items()]
    return "; ".join([*lost, *(str(death) for death in deaths if not death.machine)])


class Stretches:
    """A cell that goes on with other ranks: what its next stretch runs, and where."""

    def __init__(
        self, run: RunSpec, cell: Cell, namespace: Mapping[str, Any], names_of: Callable[[Cell], Captured]
    ) -> None:
        if run.background:
            raise UsageError("--background and --nodes MIN:MAX do not go together yet: leave one out")
        if run.ranks is not None:
            raise UsageError("--nodes MIN:MAX: ranks come and go, so %%rank cannot name some; write --nodes 2, say")
        self.run = replace(run, batches=batches_of_a_step(run, namespace))
        """of the next stretch; a step takes as many batches on any number of ranks"""
        self._whole = self.cell = cell
        self._namespace, self._names_of = namespace, names_of
        self._since = last_number(run.save_to)
        """the newest checkpoint when the notebook's objects were last what they are"""
        self._place: bytes | None = None
        """where the loops of `cell` were then; None: at the beginning"""
        self._steps = self._vain = 0
        check_loops(cell, names_of(cell), namespace)

    def go_on(self, change: GoesOn) -> str:
        """Settle from where, and on which machines; returns a sentence."""
        self._vain = 0 if change.place is not None else self._vain + 1
        if self._vain > AGAIN:
            raise change.__cause__ or change from None
        after, twice = "", False
        if change.place is not None:
            self._steps += change.steps
            self._place = change.place
            after = f"after step {self._steps:,}{LEFT if change.left else ''}"
            twice = change.lost and not change.left
        elif (saved := load_newest(self.run.save_to, self._since, self._objects())) is not None:
            after, self._place = "from the last checkpoint", saved
        else:  # what the notebook has is of the last change, or of the cell's beginning
            after = "from where it was when ranks last changed" if self._place is not None else "from its beginning"
            after += " (--save-every saves more of such a run)" if change.steps else ""
        self._since = last_number(self.run.save_to)
        before = self.run.pool
        pool = self._pool_now()
        self.run = replace(self.run, pool=pool)
        if self._place is not None:
            rest = cut(self.cell, self._place, self._names_of, self._namespace)
            self.cell, self._place = rest.cell, rest.place
            load, _ = self.run.resume or ("", b"")
            self.run = replace(self.run, resume=(load, rest.place))
            after += f", at line {rest.line}" if rest.line else " (what stands above the loop is done again)"
            if rest.anew:
                what, s = listed(rest.anew), "s" * (len(rest.anew) == 1)
                after += f"; {what} begin{s} anew, as the top of the loop's body has it"
            if twice and rest.counted:
                what, has = listed(rest.counted), "has" if len(rest.counted) == 1 else "have"
                after += f"; {what}, above backward(), {has} the batch that was cut short, and will have it again"
        now = f"{pool.world_size} rank{'s' * (pool.world_size > 1)} on {pool.nodes} machine{'s' * (pool.nodes > 1)}"
        many = f"{self.run.batches} batch{'es' * (self.run.batches > 1)}"
        kept = f"; a step takes {many}, as before" if pool.world_size != before.world_size else ""
        return f"nbtrain: {change}; the cell goes on {after}, with {now}{kept}"

    def _objects(self) -> dict[str, Any]:
        """What a checkpoint of the cell is of."""
        names = self._names_of(self._whole)
        return {name: self._namespace[name] for name in (*names.hard, *names.soft) if name in self._namespace}

    def _pool_now(self) -> PoolSpec:
        """The ranks of the machines that are there now; waits for as many as the strategy needs."""
        pool, machines = self.run.pool, self.run.pool.machines
        assert machines is not None
        entry = registry.find_strategy(self.run.strategy)
        least = -(-(1 if entry is None else entry.needs.min_ranks) * pool.nodes // pool.world_size)
        wanted = replace(machines, nodes=max(machines.nodes or 1, least))
        engine = registry.engine(pool.engine).load()
        again = pool_spec(pool.engine, engine, wanted, oversubscribe=pool.oversubscribe, start=pool.start)
        return replace(again, machines=machines)
