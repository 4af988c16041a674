"""Ends a run: brings its work into the notebook, holds it for `recover`, or drops it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.defer_interrupts import presses, shielded
from nbtrain.base.errors import FROM_RANKS, PoolError
from nbtrain.base.events import RESULT, Event, Failed, Finished
from nbtrain.base.messages import Conclude
from nbtrain.exchange.kinds.base import ATOMS, Handle
from nbtrain.exchange.kinds.remedies import OF_A_BAR
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.notebook import annexes
from nbtrain.notebook.output.rank_output import figures_can_be_shown
from nbtrain.notebook.report import exception_message
from nbtrain.notebook.report.cell_report import Reporter, drop_ahead, report
from nbtrain.notebook.report.error_hints import hint
from nbtrain.notebook.report.oom_report import LESS, ran_out, readings
from nbtrain.notebook.run.run_state import RunState
from nbtrain.notebook.run.stop_ranks import SAID
from nbtrain.notebook.sync.notebook_side import MISSING, NotebookSide

APART = (
    "Each rank has only its piece of the model, and they stand at different steps: nothing of them can be brought "
    "home. --save-every keeps checkpoints for such a case."
)

LOST = (
    "With its machine the run has lost its ranks, and the others begin anew. --nodes MIN:MAX has a run go on, if its "
    "loop is over resumable(…)."
)

KEPT = (
    "Step {steps:,} was kept: %distributed recover restores it. Another cell that trains the same objects to its end "
    "discards it."
)

INSTEAD = " It takes the place of step {steps:,} of the cell that failed before."

STILL = "Step {steps:,} of the cell that failed before is still kept: %distributed recover restores it."

GONE = (
    "Each rank has only its piece of the model, and not all are left: nothing of it can be brought home. --save-every "
    "keeps checkpoints for such a case."
)


class Homecoming:
    """Ends one run. All calls come from the kernel's main thread."""

    def __init__(self, run: RunState, take: Callable[[Event], None]) -> None:
        """`take` handles an event of the ranks."""
        self.run = run
        self._take = take
        self.ranks = run.ranks
        self.spec = run.spec
        self.outcome = run.outcome
        self.shell = run.shell
        self._found: Mapping[str, Any] = {}
        """what the names that the cell may assign held when it failed"""
        self._told: set[str] = set()
        """names that `recover` changes, as the user has been told"""
        self._together = False
        """what comes home is put together from the pieces of all ranks"""
        self.overwrites: Callable[[HomeParcel], None] = lambda home: None
        """called with what is about to come home"""
        self._keeps = False
        """what a failed cell has left on the ranks is held for `recover`"""
        self.held: NotebookSide | None = None
        """what the failed cell has left is here, packed, and knows the notebook's objects by this side's keys"""
        self.why_not_kept = "the last cell that failed had finished no step"
        self.came = False

    @property
    def _side(self) -> NotebookSide:
        if self.held is not None:
            return self.held
        assert self.ranks.notebook_side is not None
        return self.ranks.notebook_side

    def end(self, ok: bool) -> None:
        lead = self.outcome.lead if ok else self.outcome.best() if self.run.stopped and not self.run.fault else None
        if lead is None:
            self._fail()
        pieces = self.outcome.in_pieces
        if pieces and not ok and not self.outcome.at_one_step:
            self._fail()
        alike = ok or self.outcome.alike() or pieces
        stuck = self.run.open
        regroup = bool(stuck) or not (ok or self.run.quiet)
        # Pieces need a group that works to come home; what trains is bound to the old one.
        if pieces and (regroup or not self.outcome.grouped):
            self.ranks.regroup()
            regroup = alike = False
        if pieces or not ok:
            self._conclude(lead)
        regroup = regroup or not all(done.grouped for done in self.outcome.finished.values())
        self.run.over = True
        try:
            with shielded():
                self._come_home()
        except BaseException:  # the ranks hold what the notebook could not take
            if self.ranks.pool is not None:
                self.ranks.forget()
            raise
        finally:
            if regroup and self.ranks.pool is not None:
                self._form_anew(stuck)
        if not alike:  # the others' twins are not what has come home
            self.ranks.forget()
        elif pieces:
            self.ranks.parted_as = self.run.runs_as
        figures_can_be_shown()
        said = Reporter(self.run.relay.say, self.ranks.advised, self.run.cell)
        report(self._side, self.outcome.finished, self.outcome.lead, said)
        if not ok:
            raise KeyboardInterrupt(self._stopped_after())
        if self.outcome.steps:
            self.ranks.drop_outdated()

    def _form_anew(self, anew: set[int]) -> None:
        """After the cell: a new group, with new processes for these ranks."""
        self.ranks.regroup(anew)

    def conclude(self) -> list[str]:
        """After a failure: have the ranks pack what is left. Returns names that the user has changed since, and that
        coming home would overwrite, unless he was told before."""
        lead = self._packed_by() if self.held is None else self.outcome.lead
        changed = self._side.changed_since(self.outcome.finished[lead].home, self._found)
        news = [name for name in changed if name not in self._told]
        self._told.update(news)
        return news

    def hold(self) -> list[str]:
        """Before the ranks begin anew: keep what is left here, packed. Returns paths of what only they have."""
        lead = self._packed_by()
        done = self.outcome.finished[lead]
        with shielded():
            home = self.ranks.home(lead, done.home, None, self._together, hold=True)
        lost = [path for path, reason, _ in home.stayed if reason != OF_A_BAR and not path.startswith(RESULT)]
        self.outcome.finished[lead] = replace(done, home=replace(home, stayed=()))
        self.held = self._side
        return lost

    def _packed_by(self) -> int:
        """Have the ranks pack what is left; returns which one did."""
        try:
            with presses(self.run.once_shown) as self.run.presses:
                self.run.presses.only_count()
                self.run.presses.count = 1  # the next is told of, the one after that raises
                return self._conclude_on_the_best()
        except KeyboardInterrupt:  # events still to come would be taken for the next cell's
            self.ranks.lose()
            raise KeyboardInterrupt("discarded; the notebook is as it was before the failed cell") from None

    def recover(self) -> int:
        """Bring home what was concluded; returns the number of its steps."""
        lead = self.outcome.lead
        with shielded():
            self._side.rename(self._told)
            if self.held is None:
                self._come_home()
            else:  # the ranks have begun anew, and will find it as what the user has changed
                done = self.outcome.finished[lead]
                self.held.homecoming(lead, done.home, done.random_states)
                self._resumed(done)
        report(self._side, {lead: self.outcome.finished[lead]}, lead, Reporter(print, self.ranks.advised))
        return self.outcome.finished[self.outcome.lead].steps

    def _conclude_on_the_best(self) -> int:
        """On the next best if a rank dies over it; returns which it was."""
        while True:
            self._replace_the_dead()
            lead = self.outcome.best()
            assert lead is not None
            if self._conclude(lead, spare=not self.outcome.in_pieces):
                return lead

    def _replace_the_dead(self) -> None:
        """Replace ranks that died since the cell failed. What the others have can still come home."""
        ranks = self.ranks
        for event in ranks.listen(0):
            self._take(event)
        if not ranks.deaths:
            return
        self.outcome.without(ranks.gone)
        if self.outcome.best() is None:
            deaths = ranks.deaths
            ranks.lose()
            raise ranks.died(deaths)
        self.run.relay.say(f"nbtrain: {ranks.deaths[0]} since the cell failed; a new one is started")
        ranks.regroup(ranks.gone)

    def _conclude(self, lead: int, spare: bool = False) -> bool:
        """Have the ranks pack what the cell has done so far, as if it had ended there. `spare`: another rank could do
        it as well; returns False when this one has died."""
        self._together = self.outcome.in_pieces
        waiting = self.outcome.led_by(lead)
        self.ranks.send(Conclude(lead=lead), waiting)
        before, said = self.run.presses.count, False
        failed: Stopwatch | None = None
        while waiting:
            for event in self.ranks.answers(() if spare else None):
                self._take(event)
            waiting -= {*self.outcome.finished, *self.ranks.gone}
            if waiting and not said and self.run.presses.count > before:
                said = True
                self.run.relay.say("bringing the results back; press Stop again to discard them")
            if self.outcome.failed:
                failed = failed or Stopwatch()
                if waiting <= set(self.outcome.failed) or failed.seconds > SAID:  # the others fail as one did
                    self._fail()
        return lead not in self.ranks.gone

    def _stopped_after(self) -> str:
        steps = self.outcome.finished[self.outcome.lead].steps
        after = f"after step {steps:,}" if steps else "before a step was finished"
        return f"stopped {after}; what the cell did until then is in the notebook"

    def _fail(self) -> NoReturn:
        """Leave the notebook as it was, and hold what is whole on the ranks for `recover`."""
        ranks, stuck = self.ranks, self.run.open
        dead = ranks.gone
        self.outcome.without(dead)
        lost = self.outcome.lost_cards
        steps = self.outcome.steps
        keeps = bool(steps) and self.spec.pool.start != "fork" and not self.run.stopped
        held_back = KEPT.format(steps=steps) if keeps else ""
        if any(death.machine for death in ranks.deaths):
            keeps, held_back = False, LOST
        elif self.outcome.in_pieces and (dead or lost):
            keeps, held_back = False, GONE
        elif self._together:  # it failed on the way home
            keeps, held_back = False, ""
        elif self.outcome.in_pieces and not self.outcome.at_one_step:
            keeps, held_back = False, APART
        self.why_not_kept = "it is gone with its ranks" if keeps else held_back or self.why_not_kept
        if (earlier := ranks.left) is not None:
            before = earlier.outcome.steps
            if keeps and (steps >= before or not earlier.held.holds_any(self._side.table.nodes.values())):
                held_back += INSTEAD.format(steps=before)
            else:
                still = STILL.format(steps=before)
                keeps, held_back = False, still if keeps else f"{held_back} {still}".strip()
        self._keeps = keeps
        error = self._error(stuck, held_back)
        if self.run.fault and self.outcome.failed:
            shown = exception_message.first(self.outcome.failed)
            ranks.failed_rank = None if shown.card_lost else shown.rank
            with suppress(AttributeError):
                setattr(error, FROM_RANKS, True)
        quiet = self.run.quiet
        self.outcome.without(lost)
        try:
            self._replace(dead | stuck | lost, quiet)
            if keeps and ranks.pool is not None:
                ranks.left = self
                self._found = {name: self.shell.user_ns.get(name, MISSING) for name in self.run.names.writes}
            elif ranks.pool is not None:
                drop_ahead(self._side)
                ranks.forget()
        except PoolError:  # a rank takes no message; the user is told what the cell raised
            ranks.lose()
        self.run.over = True
        raise error

    def _replace(self, anew: set[int], sound: bool) -> None:
        """Replace these ranks after the cell, and form the group anew where it is not `sound`."""
        if self.spec.pool.start == "fork" or any(death.said for death in self.ranks.deaths):  # new ones would not start
            self.ranks.lose()
        elif anew or not sound:
            self._form_anew(anew)

    def _error(self, stuck: set[int], held_back: str) -> BaseException:
        deaths = self.ranks.deaths
        side = self._side
        if deaths:
            tails = {death.rank: self.run.relay.tail(death.rank) for death in deaths}
            return self.ranks.died(deaths, tails, held_back, self._less)
        if not self.run.fault:
            how, why = "killed" if self.run.killed else "stopped", f". {held_back}" if held_back else ""
            return KeyboardInterrupt(f"{how}; the notebook is as it was before this cell{why}")
        return exception_message.exception(
            self.outcome.failed, stuck, self.spec.pool.world_size, held_back,
            lambda rank, packed: side.open_alone(rank, pickle.loads(packed), "exception"),
            self._hint, self.ranks.numbers(),
        )  # fmt: skip

    def _hint(self, failed: Failed) -> str:
        if ran_out(failed) and self.ranks.pool is not None:
            return readings(self.run.memory, self.ranks.pool.pids(), self._less())
        names = self.run.names
        return hint(failed, self.shell.user_ns, (*names.hard, *names.soft), self._side, names.writes)

    def _less(self) -> str:
        """What needs less memory."""
        pids = self.ranks.pool.pids().values() if self.ranks.pool is not None else ()
        asked = self.run.names, self.shell.user_ns, self.spec, pids, self._keeps
        return str(annexes.ask("out of memory", *asked) or LESS)

    def _come_home(self) -> None:
        side, finished, lead = self._side, self.outcome.finished, self.outcome.lead
        for rank, done in finished.items():
            side.packer.released(rank, done.released)
        done = finished[lead]
        self.overwrites(done.home)
        there = {key for each in finished.values() for key in each.gradients}
        self.ranks.gradients.came_home(side.table, there, done.lost_gradients)
        done = finished[lead] = replace(done, home=self.ranks.home(lead, done.home, done.random_states, self._together))
        side.ahead.difference_update(self.run.names.hard, self.run.names.soft)
        for name in self.spec.keep:
            if type(self.shell.user_ns.get(name, MISSING)) not in (Handle, *ATOMS, object):
                side.ahead.add(name)
        self.came = True
        self._resumed(done)
        if self.outcome.everybody:
            self.ranks.adopt(done.home, [rank for rank in finished if rank != lead])
        else:
            side.others_are_behind(done.home)

    def _resumed(self, done: Finished) -> None:
        if done.resumed and self.spec.resume is not None:
            from nbtrain.worker.checkpoints import api  # it is there: a checkpoint was loaded

            api.resumed(self.spec.resume[0])
