"""One run of one cell: sent, watched, brought home or failed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import nbtrain.words as words
from nbtrain.errors import CannotTravel, PoolError
from nbtrain.events import Display, Event, Failed, Finished, Memory, Output, RankState
from nbtrain.exchange.kinds import ATOMS
from nbtrain.exchange.names import Captured
from nbtrain.exchange.residence import Handle
from nbtrain.messages import Conclude, Run, Source
from nbtrain.patience import Standing, Stopwatch
from nbtrain.session import failure
from nbtrain.session.cell import Cell
from nbtrain.session.ending import SAID, Ending
from nbtrain.session.handles import SLOW
from nbtrain.session.hints import hint
from nbtrain.session.memory import ran_out, readings
from nbtrain.session.outcome import Outcome
from nbtrain.session.ranks import BEAT, Ranks, starting
from nbtrain.session.relay import Relay, figures_can_be_shown
from nbtrain.session.report import check_ahead, drop_ahead, report, slow
from nbtrain.session.traffic import MISSING, Outgoing, Traffic
from nbtrain.shield import Presses, presses, shielded
from nbtrain.specs import PRECISIONS, RunSpec
from nbtrain.views import choose

APART = (
    "Each rank has only its piece of the model, and they stand at different steps: nothing of them can be brought "
    "home. --save-every keeps checkpoints for such a case."
)

GONE = (
    "Each rank has only its piece of the model, and not all are left: nothing of it can be brought home. --save-every "
    "keeps checkpoints for such a case."
)


class CellRun:
    """One run."""

    def __init__(self, shell: Any, ranks: Ranks, run: RunSpec, cell: Cell, names: Captured) -> None:
        self.shell = shell
        self.held = ranks
        self.spec = run
        self.cell = cell
        self.names = names
        count = run.pool.world_size
        self.outcome = Outcome(run.ranks if run.ranks is not None else tuple(range(count)), count)
        self.relay = Relay(shell, run.output, self.outcome.lead, self.outcome.ranks)
        self.view = choose(run.monitor, shell)
        self._memory: dict[int, Memory] = {}
        """what each rank has said last"""
        self._presses = Presses()
        self._ending: Ending | None = None
        """once the ranks have been sent the cell"""
        self._running = False
        """the lead has begun"""
        self._sent = 0.0
        self._said_slow = self._said_hang = False
        self._waited = Standing()
        self._found: dict[str, Any] = {}
        """what names that the cell may assign held when it failed"""
        self._told: set[str] = set()
        """names of which the user knows that `recover` changes them"""
        self._together = False
        """what comes home was put together from the pieces of all ranks"""
        self._over = True
        """no rank runs the cell, or those that did are gone"""

    def run(self) -> None:
        with presses(self._once_shown) as self._presses:
            self._run()
        if self._presses.count and not self.stopped:
            raise KeyboardInterrupt("the cell had ended before it was stopped; all it did is in the notebook")

    def _once_shown(self, do: Callable[[], None]) -> None:
        """When the notebook's cell is over."""

        def over(*_: Any) -> None:
            self.shell.events.unregister("post_execute", over)
            do()

        self.shell.events.register("post_execute", over)

    def _run(self) -> None:
        held = self.held
        ok = False
        try:
            early = held.settle()
            if held.deaths:
                print(held.have(self.spec.pool))
            self._send()
            self.view.opened("")
            held.running = True
            self._watch(early)
            held.running = False
            ok = len(self.outcome.finished) == self.spec.pool.world_size and not self.stopped
            self._end(ok)
        except BaseException:
            if not self._over:  # a view or the screen failed, or Stop was pressed and pressed: the next cell must not
                held.lose()  # hear of this one
            raise
        finally:
            held.running = False
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
        if held.parted_as not in (None, self._runs_as):  # pieces for one strategy are of no use to another
            check_ahead(traffic, held.parted_as)
            held.forget()
            traffic = held.traffic
            assert traffic is not None
        said = set(traffic.slow)
        try:
            out = traffic.outgoing(
                self.names.hard, self.names.soft, spec.options, everything_goes=forks, running=self.cell.filename
            )
            for name in traffic.slow.keys() - said:
                print(slow(name, self.shell.user_ns[name], traffic.slow[name]))
            self._presses.only_count()  # from here on the ranks have the cell
            self._post(out, sources, traffic if forks else None)
        except CannotTravel:
            raise  # the walk has taken back what it had noted
        except BaseException as error:  # what was not sent must not be taken for sent
            held.lose() if forks or isinstance(error, PoolError) else held.forget()
            raise

    def _post(self, out: Outgoing, sources: list[Source], fork_with: Traffic | None) -> None:
        held, spec = self.held, self.spec
        if fork_with is not None:
            held.fork(spec.pool, fork_with)
        self._sent = time.monotonic()
        assert held.pool is not None
        number = held.next_run()
        self._ending = Ending(held.pool, number, self._say_where)
        run = Run(
            number=number,
            spec=replace(spec, options={}),
            code=self.cell.code,
            filename=self.cell.filename,
            quiet=self.cell.quiet,
            sent=self._sent,
            ranks=self.outcome.ranks,
            parcel=out.parcel,
            drop=out.drop,
            unbind=out.unbind,
            released=out.released,
            streams=out.streams,
            sources=(*sources, *out.sources),
            surroundings=held.mirror.changes(),
        )
        self._over = False
        held.send(run, range(spec.pool.world_size))

    # -- while it runs -------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._ending is not None and self._ending.stopped

    @property
    def _runs_as(self) -> tuple[Any, ...]:
        return self.spec.strategy, dict(self.spec.options), self.spec.precision

    @property
    def _open(self) -> set[int]:
        """Who has not ended."""
        return self.outcome.silent - self.held.gone

    def _watch(self, events: list[Event]) -> None:
        held, ending = self.held, self._ending
        assert ending is not None
        while True:
            for event in events:
                self._take(event)
            if not self._open or self._presses.count > 1:  # a second press: no more waiting
                return
            if self._presses.count and not ending.stopped:
                ending.stop(self._open)
            if self._running:  # a view's time is the cell's, without the start of ranks before it
                self.view.tick(time.monotonic())
                self._say_hang()
            else:
                self._say_slow()
            if ending.tick(self._open, self._fault or self._left_alone, self._fault):
                return
            events = held.listen(BEAT)

    def _take(self, event: Event) -> None:
        if isinstance(event, Output):
            self.relay.text(event)
        elif isinstance(event, Display):
            self.relay.display(event)
        else:
            if isinstance(event, Finished):
                self.outcome.finished[event.rank] = event
                if event.began is not None:
                    self._take(event.began)
            elif isinstance(event, Failed):
                if self.held.is_ready(event.rank):  # else it could not start: it is about to end, which says so
                    self.outcome.failed[event.rank] = event
            elif isinstance(event, Memory):
                self._memory[event.rank] = event
            elif isinstance(event, RankState):
                if event.state == "starting" and self._ending is not None:
                    self._ending.late(event.rank)
                elif event.state == "running" and event.rank == self.outcome.lead:
                    self._say(event.notes)
            self.view.receive(event)

    def _say(self, notes: tuple[str, ...]) -> None:
        """The first line of a run: what was resolved."""
        self._running = True
        if self.spec.monitor == "off":
            return
        pool = self.spec.pool
        count = f"{pool.world_size} rank{'s' * (pool.world_size > 1)}"
        if pool.nodes > 1:
            count += f" in {pool.nodes} nodes"
        ranks = self.outcome.ranks
        only = "" if self.outcome.everybody else f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} only"
        precision = "" if self.spec.precision == PRECISIONS[0] else self.spec.precision
        strategy = f"{self.spec.strategy} {words.flags(self.spec.options)}".rstrip()
        print(" · ".join(part for part in (strategy, count, pool.where, precision, only, *notes) if part))

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

    def _say_where(self, ranks: set[int]) -> None:
        """Stop takes long."""
        print("\n".join(["still running:", *self.held.where(ranks), "Press Stop once more to end these ranks."]))

    def _say_hang(self) -> None:
        """Some rank waits for others for longer than it should; once a cell."""
        if self._said_hang or self._ending is None or self.stopped:
            return
        board, number = self._ending.pool.board, self._ending.number
        waits = {rank: board.waits(rank, number) for rank in self._open}
        longest = max((self._waited.seconds(rank, wait) for rank, wait in waits.items() if wait is not None), default=0)
        if longest > self.spec.hang_after:
            self._said_hang = True
            said = f"ranks have waited for each other for {longest:.0f} s (--hang-after {self.spec.hang_after:g}):"
            print("\n".join([said, *self.held.where(), "The cell goes on; Stop ends it."]))

    # -- how it ends ---------------------------------------------------------------------

    def _end(self, ok: bool) -> None:
        lead = self.outcome.lead if ok else self.outcome.best() if self.stopped and not self._fault else None
        if lead is None:
            self._fail()
        pieces = self.outcome.in_pieces
        if pieces and not ok and not self.outcome.at_one_step:
            self._fail()
        alike = ok or self.outcome.alike() or pieces
        stuck = self._open
        regroup = bool(stuck) or not (ok or self._quiet)
        if pieces and (
            regroup or not self.outcome.grouped
        ):  # they come home through a group that works; what trains is bound to the old one
            self.held.regroup()
            regroup = alike = False
        if pieces or not ok:
            self._conclude(lead)
        regroup = regroup or not all(done.grouped for done in self.outcome.finished.values())
        self._over = True
        try:
            with shielded():
                self._come_home()
        except BaseException:  # the ranks hold what the notebook could not take
            if self.held.pool is not None:
                self.held.forget()
            raise
        finally:
            if regroup and self.held.pool is not None:
                self.held.regroup(stuck)
        if not alike:  # the others' twins are not what has come home
            self.held.forget()
        elif pieces:
            self.held.parted_as = self._runs_as
        figures_can_be_shown()
        report(self._traffic, self.outcome.finished, self.outcome.lead)
        if not ok:
            raise KeyboardInterrupt(self._stopped_after())

    def conclude(self) -> list[str]:
        """After a failure: have ready what is left on the ranks. Says which names the user has changed since, and was
        not told of, where both cannot be had."""
        self._replace_the_dead()
        lead = self.outcome.best()
        assert lead is not None
        try:
            with presses(self._once_shown) as self._presses:
                self._presses.only_count()
                self._presses.count = 1  # the next is told of, the one after that raises
                self._conclude(lead)
        except KeyboardInterrupt:  # what they say yet would be taken for the next cell's
            self.held.lose()
            raise KeyboardInterrupt("given up; the notebook is as it was before the failed cell") from None
        changed = self._traffic.changed_since(self.outcome.finished[lead].home, self._found)
        news = [name for name in changed if name not in self._told]
        self._told.update(news)
        return news

    def recover(self) -> int:
        """Bring home what was concluded: so many steps."""
        with shielded():
            self._traffic.rename(self._told)
            self._come_home()
        report(self._traffic, {self.outcome.lead: self.outcome.finished[self.outcome.lead]}, self.outcome.lead)
        return self.outcome.finished[self.outcome.lead].steps

    def _replace_the_dead(self) -> None:
        """Those that died since the cell failed. What the others have can still come home."""
        held = self.held
        held.listen(0)
        if not held.deaths:
            return
        self.outcome.without(held.gone)
        if self.outcome.best() is None:
            deaths = held.deaths
            held.lose()
            raise held.died(deaths)
        print(f"nbtrain: {held.deaths[0]} since the cell failed; a new one is started")
        held.regroup(held.gone)

    @property
    def _traffic(self) -> Traffic:
        assert self.held.traffic is not None
        return self.held.traffic

    @property
    def _fault(self) -> bool:
        """Something else than Stop."""
        return bool(self.held.deaths) or self.outcome.fault

    @property
    def _quiet(self) -> bool:
        """Whether the process group can be used again."""
        gave_up = self._ending is not None and self._ending.gave_up
        return self.outcome.quiet() and self.outcome.grouped and (not gave_up or self.spec.pool.world_size == 1)

    @property
    def _left_alone(self) -> bool:
        """Whether a rank waits for one that Stop has ended. One that does not is on its way to the end of a step."""
        if not self.stopped or not self.outcome.failed:
            return False
        assert self._ending is not None
        board, number = self._ending.pool.board, self._ending.number
        return self.outcome.cut or any(board.waits(rank, number) is not None for rank in self._open)

    def _conclude(self, lead: int) -> None:
        """What the cell has done so far counts."""
        self._together = self.outcome.in_pieces
        waiting = self.outcome.led_by(lead)
        self.held.send(Conclude(lead=lead), waiting)
        before, said = self._presses.count, False
        failed: Stopwatch | None = None
        while waiting:
            for event in self.held.answers():
                self._take(event)
            waiting -= set(self.outcome.finished)
            if waiting and not said and self._presses.count > before:
                said = True
                print("what the cell did is on its way home; press Stop once more to give it up")
            if self.outcome.failed:
                failed = failed or Stopwatch()
                if waiting <= set(self.outcome.failed) or failed.seconds > SAID:  # what one says the others come to say
                    self._fail()

    def _stopped_after(self) -> str:
        steps = self.outcome.finished[self.outcome.lead].steps
        after = f"after step {steps:,}" if steps else "before a step was finished"
        return f"stopped {after}; what the cell did until then is in the notebook"

    def _fail(self) -> NoReturn:
        """The notebook is as it was; what is whole on the ranks is held for `recover`."""
        held, stuck = self.held, self._open
        dead = held.gone
        self.outcome.without(dead)
        steps = self.outcome.steps
        keeps = bool(steps) and self.spec.pool.start != "fork" and not self.stopped
        held_back = f"Step {steps:,} is held: %distributed recover brings it home." if keeps else ""
        if self.outcome.in_pieces and dead:
            keeps, held_back = False, GONE
        elif self._together:  # it went wrong on the way home
            keeps, held_back = False, ""
        elif self.outcome.in_pieces and not self.outcome.at_one_step:
            keeps, held_back = False, APART
        error = self._error(stuck, held_back)
        try:
            if self.spec.pool.start == "fork" or any(death.said for death in held.deaths):  # new ones would not start
                held.lose()
            elif dead or stuck or not self._quiet:
                held.regroup(dead | stuck)
            if keeps and held.pool is not None:
                held.left = self
                self._found = {name: self.shell.user_ns.get(name, MISSING) for name in self.names.writes}
            elif held.pool is not None:
                drop_ahead(self._traffic)
                held.forget()
        except PoolError:  # a rank takes no message; what the cell raised is what has to be told
            held.lose()
        self._over = True
        raise error

    def _error(self, stuck: set[int], held: str) -> BaseException:
        deaths = self.held.deaths
        traffic = self._traffic
        if deaths:
            tails = {death.rank: self.relay.tail(death.rank) for death in deaths}
            return self.held.died(deaths, tails, held)
        if not self._fault:
            why = f". {held}" if held else ""
            return KeyboardInterrupt(f"stopped; the notebook is as it was before this cell{why}")
        return failure.exception(
            self.outcome.failed, stuck, self.spec.pool.world_size, held,
            lambda rank, packed: traffic.open_alone(rank, pickle.loads(packed), "exception"),
            self._hint, self.held.numbers(),
        )  # fmt: skip

    def _hint(self, failed: Failed) -> str:
        if ran_out(failed) and self.held.pool is not None:
            return readings(self._memory, self.held.pool.pids())
        return hint(failed, self.shell.user_ns, (*self.names.hard, *self.names.soft), self._traffic)

    def _come_home(self) -> None:
        traffic, finished, lead = self._traffic, self.outcome.finished, self.outcome.lead
        for rank, done in finished.items():
            traffic.packer.released(rank, done.released)
        done = finished[lead]
        done = finished[lead] = replace(done, home=self.held.home(lead, done.home, done.streams, self._together))
        traffic.ahead.difference_update(self.names.hard, self.names.soft)
        for name in self.spec.keep:
            if type(self.shell.user_ns.get(name, MISSING)) not in (Handle, *ATOMS, object):
                traffic.ahead.add(name)
        if self.outcome.everybody:
            self.held.adopt(done.home.news, [rank for rank in finished if rank != lead])
        else:
            traffic.others_are_behind(done.home)
