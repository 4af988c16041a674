"""A cell from its text to its end."""

from __future__ import annotations

import time
from typing import Any

import nbtrain.registry as registry
from nbtrain.engines.base import Death, Pool
from nbtrain.events import Adopted, Display, Event, Failed, Finished, Output, RankState
from nbtrain.messages import Adopt, Forget, Run
from nbtrain.session import failure, inkernel
from nbtrain.session.cell import Cell
from nbtrain.session.names import captured
from nbtrain.session.relay import Relay
from nbtrain.session.status import report
from nbtrain.session.surroundings import Mirror
from nbtrain.session.traffic import Traffic
from nbtrain.specs import PoolSpec, RunSpec
from nbtrain.views import choose

BEAT = 0.1
"""Seconds between two looks at the clock while nothing happens."""
PEERS_END = 0.3
"""Seconds that the others have to end by themselves once a rank failed; then they are interrupted."""
STUCK = 1.0
"""Seconds after an interrupt in which a rank must have ended; it waits in a collective, so the pool is ended."""
PATIENCE = 3.0
"""The same for Stop: user code may have something to finish."""


class Session:
    """One per notebook: its pool, and the exchange with it."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self.traffic: Traffic | None = None
        self._mirror = Mirror()
        self._adopting: set[int] = set()
        self._deaths: list[Death] = []
        self._early: list[Event] = []
        shell.events.register("post_run_cell", self._between_cells)

    # -- what the magics call ------------------------------------------------------------

    def run(self, run: RunSpec, cell: Cell) -> None:
        """Run a cell; raises what it raised."""
        code = "\n" * (cell.first_line - 1) + self.shell.transform_cell(cell.source)
        extra = () if registry.find_strategy(run.strategy) else (run.strategy,)
        names = captured(code, self.shell.user_ns, extra, cell)
        if run.pool.engine == "inprocess":
            inkernel.run(self.shell, run, cell, code, names)
            return
        note = self._pool_for(run.pool)
        if note:
            print(note)
        _Cell(self, run, cell, code, names).run()

    def start(self, pool: PoolSpec) -> None:
        """Have ranks before the first cell needs them."""
        note = self._pool_for(pool)
        if note:
            print(note)
        self.wait_until_ready()

    def stop(self) -> None:
        pool, traffic = self.pool, self.traffic
        self.pool = self.traffic = None
        if traffic is not None:
            traffic.close()
        if pool is not None:
            pool.close()

    def restart(self) -> None:
        if self.pool is None:
            return
        spec = self.pool.spec
        self.stop()
        self.start(spec)

    def status(self) -> str:
        self._listen(0)
        if self._deaths:
            self.lose()
        return report(self.pool, self.traffic)

    def close(self) -> None:
        """Leave nothing behind: ranks, the process they are forked from, files."""
        self.shell.events.unregister("post_run_cell", self._between_cells)
        self.stop()
        from nbtrain.engines._local.warm import close

        close()

    # -- the pool ------------------------------------------------------------------------

    def _pool_for(self, spec: PoolSpec) -> str:
        """See to it that the right pool is there; a sentence when another had to go."""
        note = ""
        if self.pool is not None:
            self._listen(0)
            if self._deaths:
                note = f"nbtrain: {self._deaths[0]} since the last cell; new ranks are started"
                self.lose()
            elif self.pool.spec != spec:
                note = (
                    f"nbtrain: new ranks, because of {_difference(self.pool.spec, spec)}; what they held is sent again"
                )
                self.stop()
            elif spec.start == "fork":
                self.stop()  # its ranks are copies of the kernel as it was then
        if self.pool is None:
            self._open(spec)
        return note

    def _open(self, spec: PoolSpec) -> None:
        self._mirror = Mirror()
        self._adopting, self._deaths, self._early = set(), [], []
        if spec.start == "fork":
            return  # forked when the cell's names are known: see _Cell
        self.pool = registry.engine(spec.engine).load()(spec)
        self._fresh_traffic()

    def fork(self, spec: PoolSpec, traffic: Traffic) -> None:
        """Ranks that are copies of this process, made after `traffic` knows what they hold."""
        from nbtrain.session.forked import body

        self.pool = registry.engine(spec.engine).load()(spec, body(self.shell, traffic.table))
        self.traffic = traffic

    def _fresh_traffic(self) -> None:
        assert self.pool is not None
        if self.traffic is not None:
            self.traffic.close()
        numbers = getattr(self.shell.compile, "_filename_map", {})
        ranks = [info.rank for info in self.pool.ranks]
        self.traffic = Traffic(self.shell.user_ns, self.pool.directory, ranks, numbers)

    def forget(self) -> None:
        """After a failure the ranks' twins are no longer what the notebook has."""
        assert self.pool is not None
        self.pool.send(Forget(), [info.rank for info in self.pool.ranks])
        self._fresh_traffic()
        self._adopting.clear()

    def lose(self) -> None:
        """The pool cannot go on: some rank died or is stuck."""
        pool, traffic = self.pool, self.traffic
        self.pool = self.traffic = None
        self._deaths = []
        if traffic is not None:
            traffic.close()
        if pool is not None:
            pool.close(kill=True)

    def wait_until_ready(self) -> None:
        if self.pool is None:
            return
        waiting = {info.rank for info in self.pool.ranks}
        while waiting and not self._deaths:
            for event in self._listen(BEAT):
                if isinstance(event, RankState) and event.state == "ready":
                    waiting.discard(event.rank)
        if self._deaths:
            deaths = self._deaths
            self.lose()
            raise failure.died(deaths, {})

    # -- events --------------------------------------------------------------------------

    def _listen(self, seconds: float) -> list[Event]:
        """What happened; deaths and answers of an adoption are noted here."""
        if self.pool is None:
            return []
        events: list[Event] = []
        for event in self.pool.poll(seconds):
            if isinstance(event, Death):
                self._deaths.append(event)
            elif isinstance(event, Adopted):
                self._adopting.discard(event.rank)
                if self.traffic is not None:
                    self.traffic.lacks(event.lacking)
            else:
                events.append(event)
        return events

    def settle(self) -> list[Event]:
        """Every rank has said which of its own objects go with the keys of the last cell's new ones."""
        events: list[Event] = []
        while self._adopting and not self._deaths:
            events += self._listen(BEAT)
        return events

    def adopt(self, news: tuple[Any, ...], ranks: list[int]) -> None:
        if self.pool is not None and news and ranks:
            self._adopting.update(ranks)
            self.pool.send(Adopt(news=news), ranks)

    def _between_cells(self, *_: Any) -> None:
        if self.traffic is not None:
            self.traffic.let_go()


class _Cell:
    """One run."""

    def __init__(self, session: Session, run: RunSpec, cell: Cell, code: str, names: Any) -> None:
        self.session = session
        self.spec = run
        self.cell = cell
        self.code = code
        self.names = names
        self.ranks = run.ranks if run.ranks is not None else tuple(range(run.pool.world_size))
        self.everybody = set(self.ranks) == set(range(run.pool.world_size))
        self.lead = self.ranks[0]
        self.relay = Relay(session.shell, run.output, self.lead, self.ranks)
        self.view = choose(run.monitor, session.shell)
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, Failed] = {}
        self.stopped = False
        self._asked: float | None = None
        """when the ranks were last told to end"""
        self._summary = False

    def run(self) -> None:
        session = self.session
        early = session.settle()
        if session._deaths:
            session.lose()
            session._open(self.spec.pool)
        self._send()
        ok = False
        self.view.opened("")
        try:
            self._watch(early)
            ok = not self.failed and not self.stopped and len(self.finished) == self.spec.pool.world_size
            self._end(ok)
        finally:
            self.view.closed(ok)
            self.relay.close()
            if self.spec.pool.start == "fork":
                session.stop()

    def _send(self) -> None:
        session, spec = self.session, self.spec
        forks = spec.pool.start == "fork"
        traffic = session.traffic
        if forks:
            numbers = getattr(session.shell.compile, "_filename_map", {})
            traffic = Traffic(session.shell.user_ns, "", range(spec.pool.world_size), numbers)
        assert traffic is not None
        sources = [source] if (source := traffic.source(self.cell.filename)) is not None else []
        out = traffic.outgoing(self.names.hard, self.names.soft, everything_goes=forks)
        if forks:
            session.fork(spec.pool, traffic)
        assert session.pool is not None
        session.pool.send(
            Run(
                spec=spec, code=self.code, filename=self.cell.filename, quiet=self.cell.source.rstrip().endswith(";"),
                ranks=self.ranks, parcel=out.parcel, drop=out.drop, unbind=out.unbind, released=out.released,
                streams=out.streams, sources=(*sources, *out.sources), surroundings=session._mirror.changes(),
            ),
            range(spec.pool.world_size),
        )  # fmt: skip

    # -- while it runs -------------------------------------------------------------------

    def _watch(self, events: list[Event]) -> None:
        session = self.session
        everybody = set(range(self.spec.pool.world_size))
        while True:
            try:
                for event in events:
                    self._take(event)
                open_ranks = everybody - set(self.finished) - set(self.failed)
                if not open_ranks or session._deaths:
                    return
                self.view.tick(time.monotonic())
                if self._overdue(open_ranks):
                    return
                events = session._listen(BEAT)
            except KeyboardInterrupt:
                events = []
                if self.stopped:  # a second press: no more waiting
                    return
                self.stopped = True
                self._interrupt(everybody - set(self.finished) - set(self.failed))

    def _interrupt(self, ranks: set[int]) -> None:
        self._asked = time.monotonic()
        if self.session.pool is not None:
            self.session.pool.interrupt(ranks)

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
            elif isinstance(event, Failed):
                self.failed[event.rank] = event
            elif isinstance(event, RankState) and event.state == "running" and event.rank == self.lead:
                self._say(event.notes)
            self.view.receive(event)

    def _say(self, notes: tuple[str, ...]) -> None:
        """The first line of a run: what was resolved."""
        if self._summary or self.spec.monitor == "off":
            return
        self._summary = True
        pool = self.spec.pool
        count = f"{pool.world_size} rank{'s' * (pool.world_size > 1)}"
        devices = ", ".join(dict.fromkeys(pool.devices))
        only = "" if self.everybody else f"on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} only"
        print(" · ".join(part for part in (self.spec.strategy, count, devices, only, *notes) if part))

    # -- how it ends ---------------------------------------------------------------------

    def _end(self, ok: bool) -> None:
        session = self.session
        traffic = session.traffic
        assert traffic is not None
        if ok:
            self._come_home(traffic)
            return
        if session._deaths:
            deaths = session._deaths
            tails = {death.rank: self.relay.tail(death.rank) for death in deaths}
            session.lose()
            raise failure.died(deaths, tails)
        stuck = set(range(self.spec.pool.world_size)) - set(self.finished) - set(self.failed)
        error: BaseException
        if self.stopped:
            error = KeyboardInterrupt("stopped; the notebook is as it was before this cell")
        else:
            freed = {r for r, f in self.failed.items() if f.interrupted} | stuck
            error = failure.exception(
                self.failed, freed, self.spec.pool.world_size,
                lambda rank, packed: traffic.open_alone(rank, packed, "exception"),
            )  # fmt: skip
        if stuck:
            session.lose()
        else:
            session.forget()
        raise error

    def _come_home(self, traffic: Traffic) -> None:
        done = self.finished[self.lead]
        for rank, finished in self.finished.items():
            traffic.packer.released(rank, finished.released)
        traffic.homecoming(self.lead, done.home, done.streams)
        others = [rank for rank in self.ranks if rank != self.lead]
        if self.everybody:
            self.session.adopt(done.home.news, others)
        else:
            traffic.others_are_behind(done.home)
        self._report(done, traffic)

    def _report(self, done: Finished, traffic: Traffic) -> None:
        for note in done.notes:
            print(note)
        for path, reason in done.home.stayed:
            print(f"{path} stays on the ranks, the notebook has a handle for it: {reason}")
        for line in self._disagreements(traffic):
            print(line)

    def _disagreements(self, traffic: Traffic) -> list[str]:
        """What should be equal on every rank and is not. The lead's came home; the others get it with the next cell."""
        lead = dict(self.finished[self.lead].agreement or ())
        differing: dict[str, list[int]] = {}
        for rank, finished in self.finished.items():
            for name, number in finished.agreement or ():
                if lead.get(name, number) != number:
                    differing.setdefault(name, []).append(rank)
        return [
            f"rank {', '.join(map(str, ranks))} differs from rank {self.lead} in {name}; rank {self.lead}'s came home"
            for name, ranks in differing.items()
        ]


def _difference(old: PoolSpec, new: PoolSpec) -> str:
    """What makes one pool not do for the other, in the words of the options."""
    if old.devices != new.devices:
        return f"--devices: {len(old.devices)} × {old.kind} → {len(new.devices)} × {new.kind}"
    for field in ("engine", "start", "oversubscribe"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            return f"--{field}: {before} → {after}"
    return "other options"
