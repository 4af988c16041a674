"""Ends a run: brings its work into the notebook, holds it for `recover`, or drops it.

Weights and names are put in place by `sync/notebook_side.py`; here is decided whose they are, and whether at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from nbtrain.base.awake_time import AwakeTimeout, Stopwatch
from nbtrain.base.errors import FROM_RANKS, PoolError
from nbtrain.base.events import RESULT, Event, Finished, Repacked
from nbtrain.base.keyboard_interrupts import SecondPress, presses, shielded
from nbtrain.base.messages import Conclude, Leave, Serve
from nbtrain.exchange.graph.open_parcel import Unmakeable
from nbtrain.exchange.kinds.base import ATOMS, Handle, Node
from nbtrain.exchange.kinds.remedies import OF_A_BAR
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.notebook.output.rank_output import figures_can_be_shown
from nbtrain.notebook.report.cell_report import Reporter, report
from nbtrain.notebook.run.run_error import keeps_step, run_error
from nbtrain.notebook.run.run_state import RunState
from nbtrain.notebook.run.stop_ranks import SAID
from nbtrain.notebook.sync.notebook_side import MISSING, NotebookSide

BACK = "bringing the results back; press Stop again to discard them"
PACKS, PER_SECOND = 60.0, 100e6
"""Seconds that a rank may take to pack once more what the notebook could not make all of, and bytes of it a second."""


class Homecoming:
    """Ends one run. All calls come from the kernel's main thread."""

    def __init__(self, run: RunState, take: Callable[[Event], None]) -> None:
        """`take` handles an event of the ranks."""
        self.run, self._take = run, take
        self.ranks, self.spec, self.outcome, self.shell = run.ranks, run.spec, run.outcome, run.shell
        self._before: Mapping[str, Any] = {}
        """what the names that the cell may assign held when it failed"""
        self._told: set[str] = set()
        """names that `recover` changes, as the user has been told"""
        self._together = False
        """what comes home is put together from the pieces of all ranks"""
        self.overwritten: list[str] = []
        """names below which both the user and a run in the background have changed something"""
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
            steps = self.outcome.steps
            after = f"after step {steps:,}" if steps else "before a step was finished"
            stopped = KeyboardInterrupt(f"stopped {after}; what the cell did until then is in the notebook")
            vars(stopped)["place"] = self.outcome.finished[lead].place  # for who has the run gone on from there
            raise stopped
        if self.outcome.steps:
            self.ranks.kept_step.drop_outdated()

    def _form_anew(self, anew: set[int]) -> None:
        """After the cell: a new group, with new processes for these ranks."""
        self.ranks.regroup(anew)

    def conclude(self) -> list[str]:
        """After a failure: have the ranks pack what is left. Returns names that the user has changed since, and that
        coming home would overwrite, unless he was told before."""
        lead = self._packed_by() if self.held is None else self.outcome.lead
        changed = self._side.changed_since(self.outcome.finished[lead].home, self._before)
        news = [name for name in changed if name not in self._told]
        self._told.update(news)
        return news

    def hold(self) -> list[str]:
        """Before the ranks begin anew: keep what is left here, packed. Returns paths of what only they have."""
        lead = self._packed_by()
        done = self.outcome.finished[lead]
        with shielded():
            home = self._opened(lambda home: self._side.hold(lead, home))
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
                while True:  # on the next best if a rank dies over it
                    self._replace_the_dead()
                    lead = self.outcome.best()
                    assert lead is not None
                    if self._conclude(lead, spare=not self.outcome.in_pieces):
                        return lead
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
        return self.outcome.steps

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
                self.run.relay.say(BACK)
            if self.outcome.failed:
                failed = failed or Stopwatch()
                if waiting <= set(self.outcome.failed) or failed.seconds > SAID:  # the others fail as one did
                    self._fail()
        return lead not in self.ranks.gone

    def _fail(self) -> NoReturn:
        """Leave the notebook as it was, and hold what is whole on the ranks for `recover`."""
        ranks, stuck = self.ranks, self.run.open
        dead = ranks.gone
        self.outcome.without(dead)
        lost = self.outcome.lost_cards
        keeps, kept = keeps_step(self.run, self._side, self._together)
        self.why_not_kept = "it is gone with its ranks" if keeps else kept or self.why_not_kept
        error = run_error(self.run, self._side, stuck, kept, keeps)
        if self.run.fault and self.outcome.failed:
            from nbtrain.notebook.report import exception_message

            shown = exception_message.first(self.outcome.failed)
            ranks.failed_rank = None if shown.card_lost else shown.rank
            with suppress(AttributeError):
                setattr(error, FROM_RANKS, True)
        quiet = self.run.quiet
        self.outcome.without(lost)
        try:
            self._replace(dead | stuck | lost, quiet)
            if keeps and ranks.pool is not None:
                ranks.kept_step.run = self
                self._before = {name: self.shell.user_ns.get(name, MISSING) for name in self.run.names.writes}
            else:
                ranks.begin_anew()
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

    def _come_home(self) -> None:
        side, finished, lead = self._side, self.outcome.finished, self.outcome.lead
        for rank, done in finished.items():
            side.packer.released(rank, done.released)
        done = finished[lead]
        if self.spec.background:
            self.overwritten = side.changed_since(done.home, {})
        there = {key for each in finished.values() for key in each.gradients}
        self.ranks.gradients.came_home(side.table, there, done.lost_gradients)
        touched: list[Node] = []
        home = self._opened(lambda home: touched.extend(side.homecoming(lead, home, done.random_states)))
        if self.ranks.fetch is not None:
            self.ranks.fetch.attach(touched, lead)
        self.ranks.kept_step.touched = touched if self.ranks.kept_step.run is not None else []
        done = finished[lead] = replace(done, home=home)
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

    def _opened(self, take: Callable[[HomeParcel], object]) -> HomeParcel:
        """Have `take` open what the lead packed; returns it. What cannot be made in the notebook stays on the rank,
        behind a handle: then the lead packs again, together with the others if each has a piece."""
        lead = self.outcome.lead
        home: HomeParcel = self.outcome.finished[lead].home
        left: set[int] = set()
        while True:
            try:
                take(home)
            except Unmakeable as error:
                if error.key not in {key for key, _, _ in home.news} - left:
                    raise
                left.add(error.key)
                cause = error.__cause__
                why = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
                reason = f"it cannot be made in the notebook: {why}"
                self.ranks.send(Leave(key=error.key, reason=reason, together=self._together), [lead])
                others = [rank for rank in self._side.readers if rank != lead] if self._together else []
                self.ranks.send(Serve(lead=lead), others)
                home = self._repacked(lead, home)
            else:
                return home

    def _repacked(self, lead: int, before: HomeParcel) -> HomeParcel:
        """What the lead packs now. Nothing of the notebook is touched yet, so a second press on Stop ends the wait."""
        packed = sum(size for _, size in before.parcel.segments.values())
        patience, stop = AwakeTimeout(PACKS + packed / PER_SECOND), SecondPress()
        while True:
            for event in self.ranks.answers():
                if isinstance(event, Repacked):
                    home: HomeParcel = event.home
                    return home
            if stop.first():
                print(BACK)
            if stop.second or patience.over:
                self.ranks.lose()
                if stop.second:
                    raise KeyboardInterrupt("discarded; the notebook is as it was before this cell")
                raise PoolError(
                    f"rank {lead} did not pack again what the cell has done, without what cannot be made in the "
                    "notebook, and was ended; the notebook is as it was before this cell"
                )

    def _resumed(self, done: Finished) -> None:
        if done.resumed and self.spec.resume is not None:
            from nbtrain.worker.checkpoints import api  # it is there: a checkpoint was loaded

            api.resumed(self.spec.resume[0])
