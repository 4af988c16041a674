"""One run of one cell: sent, watched, brought home or failed."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

from nbtrain.events import Display, Event, Failed, Finished, Output, RankState
from nbtrain.exchange.kinds import ATOMS
from nbtrain.exchange.names import Captured
from nbtrain.exchange.residence import Handle
from nbtrain.messages import Run, Source
from nbtrain.session import failure
from nbtrain.session.cell import Cell
from nbtrain.session.handles import SLOW
from nbtrain.session.hints import hint
from nbtrain.session.ranks import BEAT, Ranks, starting
from nbtrain.session.relay import Relay, figures_can_be_shown
from nbtrain.session.report import drop_ahead, mourn, report, slow
from nbtrain.session.traffic import MISSING, Outgoing, Traffic
from nbtrain.shield import shielded
from nbtrain.specs import RunSpec
from nbtrain.views import choose

PEERS_END = 0.3
"""Seconds that the others have to end by themselves once a rank failed; then they are interrupted."""
STUCK = 1.0
"""Seconds after an interrupt in which a rank must have ended; it waits in a collective, so the pool is ended."""
PATIENCE = 3.0
"""The same for Stop: user code may have something to finish."""


class CellRun:
    """One run."""

    def __init__(self, shell: Any, ranks: Ranks, run: RunSpec, cell: Cell, names: Captured) -> None:
        self.shell = shell
        self.held = ranks
        self.spec = run
        self.cell = cell
        self.names = names
        self.ranks = run.ranks if run.ranks is not None else tuple(range(run.pool.world_size))
        self.everybody = set(self.ranks) == set(range(run.pool.world_size))
        self.lead = self.ranks[0]
        self.relay = Relay(shell, run.output, self.lead, self.ranks)
        self.view = choose(run.monitor, shell)
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, Failed] = {}
        self.stopped = False
        self._asked: float | None = None
        """when the ranks were last told to end"""
        self._running = False
        """the lead has begun"""
        self._sent = 0.0
        self._said_slow = False
        self._over = True
        """no rank runs the cell, or those that did are gone"""

    def run(self) -> None:
        held = self.held
        ok = False
        try:
            early = held.settle()
            if held.deaths:
                print(held.have(self.spec.pool))
            self._send()
            self.view.opened("")
            self._watch(early)
            ok = not self.failed and not self.stopped and len(self.finished) == self.spec.pool.world_size
            self._end(ok)
        except BaseException:
            if not self._over:  # a view or the screen failed, or a second Stop: the next cell must not hear of this one
                held.lose()
            raise
        finally:
            self.view.closed(ok)
            self.relay.close()
            if self.spec.pool.start == "fork":
                held.stop()
            held.rest()

    def _send(self) -> None:
        held, spec = self.held, self.spec
        forks = spec.pool.start == "fork"
        traffic = held.fork_traffic(spec.pool) if forks else held.traffic
        assert traffic is not None
        sources = [source] if (source := traffic.source(self.cell.filename)) is not None else []
        said = set(traffic.slow)
        out = traffic.outgoing(
            self.names.hard, self.names.soft, spec.options, everything_goes=forks, running=self.cell.filename
        )
        for name in traffic.slow.keys() - said:
            print(slow(name, self.shell.user_ns[name], traffic.slow[name]))
        try:
            self._post(out, sources, traffic if forks else None)
        except BaseException:  # what was not sent must not be taken for sent
            held.lose() if forks else held.forget()
            raise

    def _post(self, out: Outgoing, sources: list[Source], fork_with: Traffic | None) -> None:
        held, spec = self.held, self.spec
        if fork_with is not None:
            held.fork(spec.pool, fork_with)
        self._sent = time.monotonic()
        run = Run(
            spec=replace(spec, options={}),
            code=self.cell.code,
            filename=self.cell.filename,
            quiet=self.cell.quiet,
            sent=self._sent,
            ranks=self.ranks,
            parcel=out.parcel,
            drop=out.drop,
            unbind=out.unbind,
            released=out.released,
            streams=out.streams,
            sources=(*sources, *out.sources),
            surroundings=held.mirror.changes(),
        )
        with shielded():
            held.send(run, range(spec.pool.world_size))
            self._over = False

    # -- while it runs -------------------------------------------------------------------

    def _watch(self, events: list[Event]) -> None:
        held = self.held
        everybody = set(range(self.spec.pool.world_size))
        while True:
            try:
                for event in events:
                    self._take(event)
                open_ranks = everybody - set(self.finished) - set(self.failed)
                if not open_ranks or held.deaths:
                    return
                if self._running:  # a view's time is the cell's, without the start of ranks before it
                    self.view.tick(time.monotonic())
                else:
                    self._say_slow()
                if self._overdue(open_ranks):
                    return
                events = held.listen(BEAT)
            except KeyboardInterrupt:
                events = []
                if self.stopped:  # a second press: no more waiting
                    return
                self.stopped = True
                self._interrupt(everybody - set(self.finished) - set(self.failed))

    def _interrupt(self, ranks: set[int]) -> None:
        self._asked = time.monotonic()
        if self.held.pool is not None:
            self.held.pool.interrupt(ranks)

    def _overdue(self, ranks: set[int]) -> bool:
        """Whether ranks that should have ended have not: they wait in a collective that will never complete."""
        now = time.monotonic()
        if self._asked is not None:
            return now - self._asked > (PATIENCE if self.stopped else STUCK)
        if self.failed and time.time() - min(f.time for f in self.failed.values()) > PEERS_END:
            self._interrupt(ranks)
        return False

    def _take(self, event: Event) -> None:
        if isinstance(event, Output):
            self.relay.text(event)
        elif isinstance(event, Display):
            self.relay.display(event)
        else:
            if isinstance(event, Finished):
                self.finished[event.rank] = event
                if event.began is not None:
                    self._take(event.began)
            elif isinstance(event, Failed):
                self.failed[event.rank] = event
            elif isinstance(event, RankState):
                if event.state == "starting" and self._asked is not None:  # it was deaf until now
                    self._interrupt({event.rank})
                elif event.state == "running" and event.rank == self.lead:
                    self._say(event.notes)
            self.view.receive(event)

    def _say(self, notes: tuple[str, ...]) -> None:
        """The first line of a run: what was resolved."""
        self._running = True
        if self.spec.monitor == "off":
            return
        pool = self.spec.pool
        count = f"{pool.world_size} rank{'s' * (pool.world_size > 1)}"
        devices = ", ".join(dict.fromkeys(pool.devices))
        only = "" if self.everybody else f"on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} only"
        print(" · ".join(part for part in (self.spec.strategy, count, devices, only, *notes) if part))

    def _say_slow(self) -> None:
        """What takes so long, once, before the cell has begun."""
        pool = self.held.pool
        if self._said_slow or pool is None or time.monotonic() - self._sent < SLOW:
            return
        self._said_slow = True
        if not self.held.everybody_ready:
            print(starting(self.spec.pool.world_size))
        else:
            print("the ranks are putting in place what the cell reads …")

    # -- how it ends ---------------------------------------------------------------------

    def _end(self, ok: bool) -> None:
        held = self.held
        traffic = held.traffic
        assert traffic is not None
        if ok:
            self._over = True
            try:
                with shielded():
                    self._come_home(traffic)
            except BaseException:  # the ranks hold what the notebook could not take
                held.forget()
                raise
            figures_can_be_shown()
            report(traffic, self.finished, self.lead)
            return
        if held.deaths:
            deaths = held.deaths
            tails = {death.rank: self.relay.tail(death.rank) for death in deaths}
            mourn(traffic, self.shell.user_ns)
            held.lose()
            raise failure.died(deaths, tails)
        stuck = set(range(self.spec.pool.world_size)) - set(self.finished) - set(self.failed)
        error: BaseException
        if self.stopped:
            error = KeyboardInterrupt("stopped; the notebook is as it was before this cell")
        else:
            freed = {r for r, f in self.failed.items() if f.interrupted} | stuck
            error = failure.exception(
                self.failed, freed, self.spec.pool.world_size,
                lambda rank, packed: traffic.open_alone(rank, pickle.loads(packed), "exception"),
                lambda failed: hint(failed, self.shell.user_ns, (*self.names.hard, *self.names.soft), traffic),
            )  # fmt: skip
        if stuck or not self._in_step():
            mourn(traffic, self.shell.user_ns)
            held.lose()
        else:
            drop_ahead(traffic)
            held.forget()
        self._over = True
        raise error

    def _in_step(self) -> bool:
        """Whether the ranks have taken part in the same collectives. If not, the next one would pair up with one that
        was cut short, and wait for ever: an interrupt strikes each rank somewhere else."""
        if self.spec.pool.world_size == 1 or not self.everybody:  # collectives are refused on some ranks only
            return True
        ends = {(failed.name, failed.text, failed.steps) for failed in self.failed.values()}
        alike = len(self.failed) == self.spec.pool.world_size and len(ends) == 1
        return alike and not any(failed.interrupted for failed in self.failed.values())

    def _come_home(self, traffic: Traffic) -> None:
        done = self.finished[self.lead]
        for rank, finished in self.finished.items():
            traffic.packer.released(rank, finished.released)
        done = self.finished[self.lead] = replace(done, home=self.held.home(self.lead, done.home, done.streams))
        traffic.ahead.difference_update(self.names.hard, self.names.soft)
        for name in self.spec.keep:
            if type(self.shell.user_ns.get(name, MISSING)) not in (Handle, *ATOMS, object):
                traffic.ahead.add(name)
        others = [rank for rank in self.ranks if rank != self.lead]
        if self.everybody:
            self.held.adopt(done.home.news, others)
        else:
            traffic.others_are_behind(done.home)
