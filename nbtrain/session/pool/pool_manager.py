"""The ranks of one notebook: the pool, the exchange with it, and what becomes of both when something changes."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.host as host
import nbtrain.registry as registry
from nbtrain.awake_time import Patience
from nbtrain.compat import kernel
from nbtrain.defer_interrupts import shielded
from nbtrain.engines.base import Death, Pool
from nbtrain.errors import PoolError, UsageError
from nbtrain.events import Adopted, Event, Pulled, RankState, Repacked
from nbtrain.exchange.graph.open_parcel import Unmakeable
from nbtrain.messages import Adopt, Forget, Leave, Message, Serve
from nbtrain.session.pool.idle_release import MINUTES, IdleRelease
from nbtrain.session.report import exception_message
from nbtrain.session.report.oom_report import LESS
from nbtrain.session.report.report import drop_ahead, mourn, mourn_some
from nbtrain.session.report.stacks import where
from nbtrain.session.sync.handles import SLOW, Fetch
from nbtrain.session.sync.kept_handles import handles, kept
from nbtrain.session.sync.kernel_environment import EnvironmentMirror
from nbtrain.session.sync.notebook_side import NotebookSide
from nbtrain.specs import PoolSpec, difference
from nbtrain.worker.home.pack_changes import Home

BEAT = 0.05
"""Seconds between two looks at the clock while nothing happens."""
MOMENT = 0.3
"""Seconds in which a new process group is formed."""
LONG = 10.0
"""Seconds in which idle ranks must have answered a question that takes them milliseconds."""


TOO_MANY = (
    "the notebook has as many files open as it may, and ranks need some more. Close some, or allow more: "
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)), or ulimit -n 4096 before Jupyter starts"
)


def starting(count: int) -> str:
    return f"starting {count} rank{'s' * (count > 1)} …"


class PoolManager:
    """At most one pool at a time. All calls come from the kernel's main thread."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self.traffic: NotebookSide | None = None
        self.fetch: Fetch | None = None
        self.mirror = EnvironmentMirror(self.shell)
        self.deaths: list[Death] = []
        """ranks that died and were not spoken of yet"""
        self.on_idle: Callable[[], None] = lambda: None
        """called, from another thread, when idle ranks gave their GPUs back"""
        self.left: Any = None
        """the failed run whose last step is still on the ranks"""
        self.advised: set[tuple[str, str]] = set()
        """what the notebook was told once (report.py)"""
        self._runs = 0
        self._killed = 0
        """how many processes the system had ended for want of memory when the ranks were started"""
        self.parted_as: Any = None
        """under which strategy and options the ranks keep models in pieces; None: they do not"""
        self.running = False
        """a cell is on its way through them"""
        self._idle: IdleRelease | None = None
        self._adopting: set[int] = set()
        self._ready: set[int] = set()
        self._replaced = False
        """some have come anew since the twins were last sent"""

    # -- which ranks there are -----------------------------------------------------------

    def have(self, spec: PoolSpec) -> str:
        """See to it that the right pool is there, or about to be; a sentence when another had to go."""
        note = ""
        if self._idle is not None:
            self._idle.stop()
        if spec.start == "fork" and (why := fork_safety.why_not_fork()) is not None:
            raise UsageError(why)
        try:
            self.listen(0)
        except PoolError as error:  # who forks the ranks is gone, and they with it
            note = f"nbtrain: {str(error).splitlines()[0]}; new ones are started"
        if self.deaths or self._given_back:  # news of a death comes when it comes; what we ended ourselves is known
            note = f"nbtrain: {self._why_gone()}; {'a new one is' if self._replace() else 'new ones are'} started"
        if self.pool is not None and self.pool.spec != spec:
            self._keep(difference(self.pool.spec, spec))
            note = f"nbtrain: new ranks, because of {difference(self.pool.spec, spec)}; what they held is sent again"
            self.stop()
        elif spec.start == "fork" and self.pool is not None:
            self._keep("--start fork")
            self.stop()  # its ranks are copies of the kernel as it was then
        if self.pool is None:
            self.open(spec)
        return note

    def next_run(self) -> int:
        """A number that no run of this notebook has had."""
        self._runs += 1
        return self._runs

    def where(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Where these ranks are, or all."""
        assert self.pool is not None
        asked = [info.rank for info in self.pool.ranks] if ranks is None else ranks
        return where(self.pool, asked, self._runs if self.running else -1, self.numbers())

    def drop_left(self) -> str:
        """The next cell starts from the notebook; a sentence when that loses something."""
        if self.left is None:
            return ""
        run, self.left = self.left, None
        drop_ahead(self.traffic)
        self.forget()
        return f"nbtrain: what the failed cell had left on the ranks, step {run.outcome.steps:,}, is dropped"

    def _keep(self, reason: str) -> None:
        """Nobody's work goes because of an option."""
        held = list(kept(self.traffic.table, self.shell.user_ns)) if self.traffic is not None else []
        if held:
            raise UsageError(
                f"{', '.join(held)}: what is behind {'this name' if len(held) == 1 else 'these names'} lives on the "
                f"present ranks only, and {reason} asks for new ones. Bring it home with {held[0]} = {held[0]}.pull(), "
                "or let it go with %distributed stop"
            )

    def _replace(self) -> bool:
        """Those that died since the last cell; whether the others could stay."""
        assert self.pool is not None
        dead = self.gone
        if self._given_back or len(dead) == len(self.pool.ranks):
            mourn(self.traffic, self.shell.user_ns)
            self.lose()
            return False
        self.regroup(dead)
        self.forget()
        return True

    @property
    def _given_back(self) -> bool:
        return self._idle is not None and self._idle.released

    @property
    def gone(self) -> set[int]:
        """Those that died since the last cell, and those that wait for them to form a group with."""
        if self.pool is None or not self.deaths:
            return set()
        return {death.rank for death in self.deaths} | ({info.rank for info in self.pool.ranks} - self._ready)

    def _why_gone(self) -> str:
        if self._given_back:
            return f"the ranks had been idle for {MINUTES} minutes and gave their GPUs back"
        return f"{self.deaths[0]} since the last cell"

    def open(self, spec: PoolSpec) -> None:
        self.mirror = EnvironmentMirror(self.shell)
        self._adopting, self._ready, self.deaths = set(), set(), []
        self._replaced = False
        if spec.start == "fork":
            return  # forked when it is known what a cell reads: see `fork`
        self._killed = host.out_of_memory_kills() or 0
        try:
            self.pool = registry.engine(spec.engine).load()(spec)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise PoolError(TOO_MANY) from error
            raise
        self._new_traffic()
        if spec.kind == "cuda":
            self._idle = IdleRelease(self._give_back, after=self.on_idle)

    def fork(self, spec: PoolSpec, traffic: NotebookSide) -> None:
        """Ranks that are copies of this process, made after `traffic` knows what they hold."""
        from nbtrain.session.pool.fork_child import body

        self.pool = registry.engine(spec.engine).load()(spec, body(self.shell, traffic.table))
        self.traffic = traffic

    def fork_traffic(self, spec: PoolSpec) -> NotebookSide:
        return NotebookSide(self.shell.user_ns, "", range(spec.world_size), self.numbers())

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that there are."""
        return tuple(self.pool.pids().values()) if self.pool is not None else ()

    @property
    def out_of_memory_kills(self) -> bool:
        """The system has ended something for want of memory since the ranks were started."""
        return (host.out_of_memory_kills() or 0) > self._killed

    @property
    def everybody_ready(self) -> bool:
        return self.pool is None or len(self._ready) == len(self.pool.ranks)

    def is_ready(self, rank: int) -> bool:
        return rank in self._ready

    def catch_up(self) -> None:
        """Hear what they have to say, those too that form a new group at this moment."""
        self.listen(0)
        patience = Patience(MOMENT)
        while not self.everybody_ready and not self.deaths and not patience.over:
            self.listen(BEAT)

    def wait_until_ready(self) -> None:
        if self.pool is None:
            return
        began: float | None = time.monotonic()
        while not self.everybody_ready and not self.deaths:
            if began is not None and time.monotonic() - began > SLOW:
                print(starting(len(self.pool.ranks)))
                began = None
            self.listen(BEAT)
        if self.deaths:
            deaths = self.deaths
            self.lose()
            raise self.died(deaths)

    def died(
        self,
        deaths: Iterable[Death],
        tails: Mapping[int, str] | None = None,
        held: str = "",
        less: Callable[[], str] = lambda: LESS,
    ) -> Exception:
        """What to raise for them. `less`: says what needs less memory."""
        killed = self.out_of_memory_kills
        return exception_message.died(deaths, tails or {}, self.numbers(), killed, held, less)

    def _new_traffic(self, spared: bool = False) -> None:
        """`spared`: the ranks still have what the notebook has handles for."""
        assert self.pool is not None
        traffic, fetch = self.traffic, self.fetch
        if self.traffic is not None:
            self.traffic.close()
        ranks = [info.rank for info in self.pool.ranks]
        self.traffic = NotebookSide(self.shell.user_ns, self.pool.directory, ranks, self.numbers())
        if spared and traffic is not None:
            self.traffic.inherit(traffic)
        if fetch is not None:
            fetch.close()
        self.fetch = Fetch(self.traffic, ranks, self.send, self.answers, self._dead, lambda: self.parted_as is not None)
        self.fetch.busy = lambda: self.running
        if spared and fetch is not None:
            self.fetch.inherit(fetch)

    def numbers(self) -> dict[str, int]:
        """File names of cells → their numbers; IPython 7 has none."""
        found = kernel.cell_names(self.shell)
        return {} if found is None else found

    # -- how they end --------------------------------------------------------------------

    def stop(self) -> None:
        self._end(kill=False)

    def lose(self) -> None:
        """The pool cannot go on: some rank died or is stuck."""
        self._end(kill=True)

    def _end(self, kill: bool) -> None:
        pool, traffic, idle = self.pool, self.traffic, self._idle
        if self.fetch is not None:
            self.fetch.close()
        self.pool = self.traffic = self.fetch = self._idle = self.left = self.parted_as = None
        self.deaths = []
        if idle is not None:
            idle.stop()
        if traffic is not None:
            traffic.close()
        if pool is not None:
            pool.close(kill=kill)

    def forget(self) -> None:
        """After a failure the ranks' twins are no longer what the notebook has."""
        assert self.pool is not None
        assert self.traffic is not None
        self.traffic.release_dropped()
        table = self.traffic.table
        spare = tuple(node.key for node in handles(table, worth=True))
        known = table.nodes.keys() - set(table.unreachable(spare)) - {node.key for node in handles(table)}
        forget = Forget(spare=spare, known=tuple(known), whole=not self._replaced)
        self.pool.send(forget, [info.rank for info in self.pool.ranks])
        self.parted_as = None
        self._replaced = False
        self._new_traffic(spared=bool(spare))
        self._adopting.clear()

    def regroup(self, anew: Iterable[int] = ()) -> None:
        """A new process group, and new processes for these ranks; what the others hold lives on."""
        assert self.pool is not None
        assert self.traffic is not None
        anew = set(anew)
        self.deaths = [death for death in self.deaths if death.rank not in anew]
        if len(self.pool.ranks) > 1:
            self._ready.clear()
        self._adopting -= anew
        self._replaced |= bool(anew)
        if anew:
            self.mirror = EnvironmentMirror(
                self.shell
            )  # the new ones have been told nothing of the kernel's surroundings
        if anew == {info.rank for info in self.pool.ranks}:
            mourn(self.traffic, self.shell.user_ns)
        elif anew:
            mourn_some(self.traffic, self.shell.user_ns, anew)
        if self.fetch is not None:
            self.fetch.replaced(anew)
        self.pool.regroup(anew)

    def rest(self) -> None:
        """A cell is over: from here on they are idle."""
        if self._idle is not None:
            self._idle.start()

    def _give_back(self) -> bool:
        """In the clock's thread: processes may be ended from there, sockets not touched."""
        pool, traffic = self.pool, self.traffic
        if pool is None or traffic is None or self.left is not None or handles(traffic.table, worth=True):
            return False
        pool.kill()
        return True

    # -- talking to them -----------------------------------------------------------------

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        if self.pool is not None:
            self.pool.send(message, ranks)

    def listen(self, seconds: float) -> list[Event]:
        """What happened; deaths and answers of an adoption are noted here."""
        with shielded():  # what was heard once is not heard again
            try:
                heard = [] if self.pool is None else self.pool.poll(seconds)
            except PoolError:
                self.lose()
                raise
            return [left for event in heard if (left := self._note(event)) is not None]

    def _note(self, event: Event | Death) -> Event | None:
        """What is left of it for others to do."""
        if isinstance(event, Death):
            self.deaths.append(event)
            return None
        if isinstance(event, Adopted):
            self._adopting.discard(event.rank)
            if self.traffic is not None:
                self.traffic.lacks(event.lacking)
            return None
        if isinstance(event, Pulled) and self.fetch is not None:
            self.fetch.missed(event)
        if isinstance(event, RankState) and event.state == "ready":
            self._ready.add(event.rank)
        return event

    def home(self, lead: int, home: Home, streams: Any, together: bool) -> Home:
        """Take home what the lead packed, `together` with the others if each had a piece. What the notebook cannot make
        stays there, behind a handle."""
        assert self.traffic is not None
        left: set[int] = set()
        while True:
            try:
                touched = self.traffic.homecoming(lead, home, streams)
            except Unmakeable as error:
                if error.key not in {key for key, _, _ in home.news} - left:
                    raise
                left.add(error.key)
                cause = error.__cause__
                why = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
                others = [rank for rank in self.traffic.readers if rank != lead] if together else []
                reason = f"it cannot be made in the notebook: {why}"
                self.send(Leave(key=error.key, reason=reason, together=together), [lead])
                self.send(Serve(lead=lead), others)
                home = self._repacked()
            else:
                if self.fetch is not None:
                    self.fetch.attach(touched, lead)
                return home

    def _repacked(self) -> Home:
        while True:
            for event in self.answers():
                if isinstance(event, Repacked):
                    home: Home = event.home
                    return home

    def answers(self, asked: Iterable[int] | None = None) -> list[Event]:
        """What ranks say that were asked something between two cells: these, or all."""
        events = [*self.settle(), *self.listen(BEAT)]
        dead = {death.rank for death in self.deaths}
        if self.pool is None or (dead if asked is None else dead.intersection(asked)):
            deaths = self.deaths
            self.lose()
            raise self.died(deaths)
        return events

    def adopt(self, news: tuple[Any, ...], ranks: list[int]) -> None:
        """The lead made new objects: the others are to find their own. They answer while the notebook goes on."""
        if news and ranks:
            self._adopting.update(ranks)
            self.send(Adopt(news=news), ranks)

    def _dead(self) -> set[int]:
        """Who has died since the last cell."""
        self.listen(0)
        return {death.rank for death in self.deaths}

    def settle(self) -> list[Event]:
        """Wait until every rank has answered the last adoption; what else was heard meanwhile."""
        events: list[Event] = []
        patience = Patience(LONG)
        while self._adopting and not self.deaths:
            events += self.listen(BEAT)
            if patience.over:
                ranks = ", ".join(map(str, sorted(self._adopting)))
                self.lose()
                raise PoolError(f"rank {ranks} did not answer between two cells and was ended; run the cell again")
        return events
