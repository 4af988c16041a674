"""`--nodes MIN:MAX`: a run that goes on when a machine is lost, and takes in one that joins.

What a survivor has after its last whole step comes home, as `recover` would bring it; ranks are started on the machines
that are there; and the cell goes on behind that step: its `resumable` loops know their places. Each step takes as many
batches as with the ranks that began, so that learning rates keep their meaning. Where models are in pieces a lost rank
takes its piece along: then the last checkpoint of the run is what is gone on from.

A machine that joins is taken in between two steps, in the same way, without any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from nbtrain.base.defer_interrupts import shielded
from nbtrain.base.errors import NbtrainError
from nbtrain.base.humanize import listed
from nbtrain.base.specs import RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.report.cell_report import Reporter, drop_ahead, report
from nbtrain.notebook.run.bring_home import Homecoming
from nbtrain.notebook.run.elastic_cell import check_loops, cut

LEFT = (
    " (what stands below optimizer.step() was not done for that step: what waits for other ranks belongs between "
    "backward() and step())"
)
AGAIN = 3
"""Beginnings without a step between them after which it is no machine's fault."""
TOGETHER = 1.0
"""Seconds for which a run waits for more machines once one has joined."""


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
            raise GoesOn(why, steps, None) from self._error(self.run.open, "")
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


class ElasticRun:
    """Runs one cell to its end, over as many stretches as it takes."""

    def __init__(
        self,
        spec: RunSpec,
        cell: Cell,
        namespace: Mapping[str, Any],
        play: Callable[[RunSpec, Cell], None],
        names_of: Callable[[Cell], Captured],
        end_ranks: Callable[[], None],
        pool_now: Callable[[RunSpec], RunSpec],
        load: Callable[[RunSpec, Captured, int], bytes | None],
        last_saved: Callable[[RunSpec], int],
        say: Callable[[str], None] = print,
    ) -> None:
        """`spec` says how many batches a step takes, on any number of ranks. `play` runs a stretch and raises `GoesOn`
        where the ranks change. `pool_now`: the same run, on the machines that are there now. `load`: put the newest
        checkpoint after the one of that number into the notebook's objects, and tell where its loops are; None if there
        is none. `last_saved`: the number of the newest there is."""
        self._spec = spec
        self._whole = self._cell = cell
        self._namespace = namespace
        self._play, self._names_of, self._end_ranks = play, names_of, end_ranks
        self._pool_now, self._load, self._say = pool_now, load, say
        self._last_saved = last_saved
        self._since = last_saved(spec)
        """the newest checkpoint when the notebook's objects were last what they are"""
        self._place: bytes | None = None
        """where its loops were then; None: at the beginning"""
        self._steps = 0
        check_loops(cell, names_of(cell), namespace)

    def run(self) -> None:
        vain = 0
        while True:
            try:
                return self._play(self._spec, self._cell)
            except GoesOn as change:
                self._end_ranks()
                vain = 0 if change.place is not None else vain + 1
                if vain > AGAIN:
                    raise change.__cause__ or change from None
                self._go_on(change)

    def _go_on(self, change: GoesOn) -> None:
        """Settle from where, and on which machines."""
        after, twice = "", False
        if change.place is not None:
            self._steps += change.steps
            self._place = change.place
            after = f"after step {self._steps:,}{LEFT if change.left else ''}"
            twice = change.lost and not change.left
        elif (saved := self._load(self._spec, self._names_of(self._whole), self._since)) is not None:
            after, self._place = "from the last checkpoint", saved
        else:  # what the notebook has is of the last change, or of the cell's beginning
            after = "from where it was when ranks last changed" if self._place is not None else "from its beginning"
            after += " (--save-every saves more of such a run)" if change.steps else ""
        self._since = self._last_saved(self._spec)
        before = self._spec.pool
        self._spec = self._pool_now(self._spec)
        if self._place is not None:
            found = cut(self._whole, self._place, self._names_of, self._namespace)
            self._cell, place = found.cell, found.place
            load, _ = self._spec.resume or ("", b"")
            self._spec = replace(self._spec, resume=(load, place))
            after += f", at line {found.line}" if found.line else " (what stands above the loop is done again)"
            if found.anew:
                what, s = listed(found.anew), "s" * (len(found.anew) == 1)
                after += f"; {what} begin{s} anew, as the top of the loop's body has it"
            if twice and found.counted:
                what, has = listed(found.counted), "has" if len(found.counted) == 1 else "have"
                after += f"; {what}, above backward(), {has} the batch that was cut short, and will have it again"
        pool = self._spec.pool
        now = f"{pool.world_size} rank{'s' * (pool.world_size > 1)} on {pool.nodes} machine{'s' * (pool.nodes > 1)}"
        many = f"{self._spec.batches} batch{'es' * (self._spec.batches > 1)}"
        kept = f"; a step takes {many}, as before" if pool.world_size != before.world_size else ""
        self._say(f"nbtrain: {change}; the cell goes on {after}, with {now}{kept}")
