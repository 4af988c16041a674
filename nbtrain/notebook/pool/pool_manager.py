"""Starts, replaces and ends the ranks of one notebook, and keeps the exchange with them in step."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.host as host
import nbtrain.machine.registry as registry
from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.defer_interrupts import SecondPress, shielded
from nbtrain.base.errors import PoolError, UsageError
from nbtrain.base.events import Adopted, Event, Pulled, RankLocals, RankState, Repacked
from nbtrain.base.humanize import listed
from nbtrain.base.messages import Adopt, Forget, Leave, Message, Serve
from nbtrain.base.specs import PoolSpec, difference
from nbtrain.compat import kernel, widgets
from nbtrain.engines.base import Death, Pool
from nbtrain.exchange.graph.open_parcel import Unmakeable
from nbtrain.exchange.kinds.base import Node
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.notebook.output.rank_widgets import RankWidgets
from nbtrain.notebook.pool.idle_release import MINUTES, IdleRelease
from nbtrain.notebook.report import exception_message
from nbtrain.notebook.report.cell_report import drop_ahead, report_lost, report_partly_lost
from nbtrain.notebook.report.oom_report import LESS
from nbtrain.notebook.report.stacks import locals_lines, where
from nbtrain.notebook.sync.handles import SLOW, Fetch
from nbtrain.notebook.sync.kept_handles import kept, live_handles
from nbtrain.notebook.sync.kernel_environment import SentEnvironment
from nbtrain.notebook.sync.notebook_side import NotebookSide
from nbtrain.notebook.sync.waiting_gradients import WaitingGradients
from nbtrain.worker.loop.shared_board import LOCALS

if TYPE_CHECKING:
    from nbtrain.notebook.pool.other_versions import OtherVersions

BEAT = 0.05
"""Seconds to wait for an event before the clock is looked at again."""
MOMENT = 0.3
"""Seconds that a new process group may take to form."""
ANSWER = 2.0
"""Seconds in which a rank whose interpreter is not busy tells its locals."""
LONG = 10.0
"""Seconds after which an idle rank that has not answered is taken for stuck; answers take milliseconds."""
PACKS, PER_SECOND = 60.0, 100e6
"""Seconds that a rank may take to pack once more what the notebook could not make all of, and bytes of it a second."""


TOO_MANY = (
    "the notebook has reached its limit of open files, and ranks need more. Close some, or allow more: "
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)), or ulimit -n 4096 before Jupyter starts"
)


def starting(count: int) -> str:
    return f"starting {count} rank{'s' * (count > 1)} …"


class PoolManager:
    """At most one pool at a time. But for `wake`, all calls come from the kernel's main thread."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self.notebook_side: NotebookSide | None = None
        self.fetch: Fetch | None = None
        self.environment = SentEnvironment(self.shell)
        self._versions: OtherVersions | None = None
        """what was said of packages on other machines"""
        self.deaths: list[Death] = []
        """ranks that died, of which the user has not been told"""
        self.on_idle: Callable[[], None] = lambda: None
        """called, from another thread, when idle ranks have given their GPUs back"""
        self.left: Any = None
        """the failed run whose last step is kept: on the ranks until the next cell, then here (`held`)"""
        self.why_none_left = "no cell has failed"
        self._touched: list[Node] = []
        """what the last cell has brought home, as far as somebody may ask"""
        self.failed_rank: int | None = None
        """the rank whose error was shown, as long as it keeps its frames"""
        self.advised: set[tuple[str, str]] = set()
        """what the user has been told once (cell_report.py)"""
        self._runs = 0
        self._killed = self._killed_anywhere = 0
        """how many processes the system had ended for lack of memory when the ranks were started"""
        self.parted_as: Any = None
        """strategy and options under which the ranks keep models in pieces; None: they do not"""
        self.gradients = WaitingGradients()
        self.widgets = RankWidgets()
        self.running = False
        self._idle: IdleRelease | None = None
        self._adopting: set[int] = set()
        self._ready: set[int] = set()
        self._locals: dict[int, RankLocals] = {}
        """the last that each rank has told"""
        self._replaced = False
        """some were replaced since the twins were last sent"""

    # -- starting ranks ------------------------------------------------------------------

    def have(self, spec: PoolSpec) -> str:
        """Start this pool unless it runs already; returns a sentence when another had to go."""
        note = ""
        if self._idle is not None:
            self._idle.stop()
        if spec.start == "fork" and (why := fork_safety.why_not_fork()) is not None:
            raise UsageError(why)
        try:
            self.listen(0)
        except PoolError as error:  # the nursery is gone, and the ranks with it
            note = f"nbtrain: {str(error).splitlines()[0]}; new ones are started"
        if self.deaths and self.pool is not None and self.pool.spec != spec:
            note = f"nbtrain: {self._why_gone()}; new ranks, because of {difference(self.pool.spec, spec)}"
            report_lost(self.notebook_side, self.shell.user_ns)
            self.lose()
        if self.deaths or self._given_back:  # a death may be reported late; what we ended ourselves is known
            note = f"nbtrain: {self._why_gone()}; {'a new one is' if self._replace() else 'new ones are'} started"
        if self.pool is not None and self.pool.spec != spec:
            self.keep(difference(self.pool.spec, spec))
            note = f"nbtrain: new ranks, because of {difference(self.pool.spec, spec)}; what they held is sent again"
            self.stop()
        elif spec.start == "fork" and self.pool is not None:
            self.keep("--start fork")
            self.stop()  # its ranks are copies of the kernel as it was then
        if self.pool is None:
            self.open(spec)
        return note

    def wake(self) -> None:
        """Have `listen` return. May be called by a signal handler, and by any thread."""
        if (pool := self.pool) is not None:
            pool.wake()

    def next_run(self) -> int:
        """A number that no run of this notebook has had."""
        self._runs += 1
        return self._runs

    def where(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Where these ranks are, or all."""
        assert self.pool is not None
        asked = [info.rank for info in self.pool.ranks] if ranks is None else ranks
        return where(self.pool, asked, self._runs if self.running else -1, self.numbers())

    def locals(self) -> list[str]:
        """What the user's innermost calls hold on each rank. Asked while another thread listens to the ranks."""
        assert self.pool is not None
        if not self.running:
            return ["no cell runs, so there are no locals"]
        head = self.pool.board.head
        head[LOCALS] = asked = head[LOCALS] + 1
        patience = AwakeTimeout(ANSWER)
        ranks = [info.rank for info in self.pool.ranks]
        while not patience.over and any(self._told(rank, asked) is None for rank in ranks):
            time.sleep(0.01)
        return [line for rank in ranks for line in locals_lines(rank, self._told(rank, asked), self.numbers())]

    def _told(self, rank: int, asked: int) -> RankLocals | None:
        told = self._locals.get(rank)
        return told if told is not None and told.asked == asked else None

    @property
    def left_on_ranks(self) -> bool:
        """Whether a failed run's last step is nowhere but on the ranks."""
        return self.left is not None and self.left.held is None

    def hold_left(self) -> str:
        """Before the next cell: take what a failed run has left off the ranks, which begin anew. Returns a sentence."""
        if self.left is None or not self.left_on_ranks:
            return ""
        run, self.left = self.left, None
        step = f"nbtrain: step {run.outcome.steps:,} of the failed cell"
        try:
            lost = run.hold()
        except Exception as error:  # a rank may raise anything while it packs; the next cell runs all the same
            self.left, why = None, str(error).partition("\n")[0]
            self.why_none_left = f"{step.removeprefix('nbtrain: ')} could not be packed ({why})"
            note = f"nbtrain: {self.why_none_left}, and is discarded"
        else:
            self.left = run
            note = f"{step} stays kept until another cell has trained the same objects to its end: %distributed recover"
            note += f" restores it{f', but for {listed(lost)}, which only its ranks had' if lost else ''}"
        if self.pool is not None:
            drop_ahead(self.notebook_side)
            self.forget()
        return note

    def drop_outdated(self) -> None:
        """A cell has taken steps and come to its end: a kept step of the same tensors is none to go back to."""
        if self.left is not None and self.left.held.holds_any(self._touched):
            self.drop_left("another cell has trained the same objects since")

    def drop_left(self, why: str) -> None:
        if self.left is not None:
            self.left, self.why_none_left = None, why

    def keep(self, reason: str) -> None:
        """Raises where new ranks would lose what lives on the present ones only."""
        held = list(kept(self.notebook_side.table, self.shell.user_ns)) if self.notebook_side is not None else []
        if held:
            raise UsageError(
                f"{', '.join(held)}: what is behind {'this name' if len(held) == 1 else 'these names'} lives only on "
                f"the current ranks, and {reason} asks for new ones. Bring it home with {held[0]} = {held[0]}.pull(), "
                "or discard it with %distributed stop"
            )

    def _replace(self) -> bool:
        """Replace the ranks that died since the last cell; returns whether the others could stay."""
        assert self.pool is not None
        dead = self.gone
        if self._given_back or len(dead) == len(self.pool.ranks):
            report_lost(self.notebook_side, self.shell.user_ns)
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
        """Ranks that died since the last cell, and those that wait for them to form a group with."""
        if self.pool is None or not self.deaths:
            return set()
        return {death.rank for death in self.deaths} | ({info.rank for info in self.pool.ranks} - self._ready)

    def _why_gone(self) -> str:
        if self._given_back:
            return f"the ranks had been idle for {MINUTES} minutes and gave their GPUs back"
        return f"{self.deaths[0]} since the last cell"

    def open(self, spec: PoolSpec) -> None:
        self.environment = SentEnvironment(self.shell)
        self._adopting, self._ready, self.deaths = set(), set(), []
        self._replaced = False
        if spec.start == "fork":
            return  # they are forked once it is known what the cell reads: see `fork`
        self._killed = host.out_of_memory_kills() or 0
        self._killed_anywhere = host.out_of_memory_kills(anywhere=True) or 0
        try:
            self.pool = registry.engine(spec.engine).load()(spec)
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise PoolError(TOO_MANY) from error
            if why := host.of_processes(str(error), starting=True):
                raise PoolError(why) from error
            raise
        self._new_side()
        if spec.kind == "cuda":
            self._idle = IdleRelease(self._give_back, after=self.on_idle)

    def fork(self, spec: PoolSpec, side: NotebookSide) -> None:
        """Start ranks that are copies of this process, once `side` knows what they hold."""
        from nbtrain.worker.process.rank_config import RankConfig
        from nbtrain.worker.rank import Rank

        in_notebook = widgets.in_notebook()

        def live(config: RankConfig) -> None:
            from nbtrain.worker.shell.shell import make_shell

            Rank(config, make_shell(self.shell.user_module, in_notebook=in_notebook), side.table).serve()

        self.pool = registry.engine(spec.engine).load()(spec, live)
        self.notebook_side = side

    def other_versions(self, code: str, names: Iterable[str]) -> list[str]:
        """Sentences on packages that this cell, which reads these names, uses and other machines have otherwise."""
        from nbtrain.engines.remote.lobby import lobby  # on use: most notebooks stay on one machine
        from nbtrain.notebook.pool.other_versions import OtherVersions

        self._versions = self._versions or OtherVersions()
        values = [self.shell.user_ns[name] for name in names if name in self.shell.user_ns]
        return self._versions.lines(values, code, [peer.machine for peer in lobby().machines()])

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self.pool.pids().values()) if self.pool is not None else ()

    @property
    def out_of_memory_kills(self) -> bool:
        """Whether the system has ended a process for lack of memory since the ranks were started."""
        return (host.out_of_memory_kills() or 0) > self._killed

    @property
    def everybody_ready(self) -> bool:
        return self.pool is None or len(self._ready) == len(self.pool.ranks)

    def is_ready(self, rank: int) -> bool:
        return rank in self._ready

    def catch_up(self) -> None:
        """Receive what the ranks have sent, also those that are forming a new group at this moment."""
        self.listen(0)
        patience = AwakeTimeout(MOMENT)
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
        """The exception to raise for these deaths. `less` returns what needs less memory."""
        killed: bool | None = self.out_of_memory_kills
        if not killed and (host.out_of_memory_kills(anywhere=True) or 0) > self._killed_anywhere:
            killed = None
        spec = self.pool.spec if self.pool is not None else None
        ranks = spec.world_size // (spec.nodes if spec.machines is not None else 1) if spec is not None else 1
        return exception_message.died(deaths, tails or {}, self.numbers(), killed, held, less, ranks)

    def _new_side(self, keeps_handles: bool = False) -> None:
        """`keeps_handles`: the ranks still have what the notebook has handles for."""
        assert self.pool is not None
        side, fetch = self.notebook_side, self.fetch
        if self.notebook_side is not None:
            self.notebook_side.close()
        ranks = [info.rank for info in self.pool.ranks]
        self.notebook_side = NotebookSide(self.shell.user_ns, self.pool.directory, ranks, self.numbers())
        if keeps_handles and side is not None:
            self.notebook_side.inherit(side)
        if fetch is not None:
            fetch.close()
        self.fetch = Fetch(
            self.notebook_side, self.send, self.answers, self._dead, lambda: self.parted_as is not None,
            lambda: self.running,
        )  # fmt: skip
        if keeps_handles and fetch is not None:
            self.fetch.inherit(fetch)

    def numbers(self) -> dict[str, int]:
        """File names of cells → their numbers; IPython 7 has none."""
        found = kernel.cell_names(self.shell)
        return {} if found is None else found

    # -- ending ranks --------------------------------------------------------------------

    def stop(self) -> None:
        self._end(kill=False)

    def lose(self) -> None:
        """End a pool that cannot go on: some rank died or is stuck."""
        self._end(kill=True)

    def _end(self, kill: bool) -> None:
        pool, side, idle = self.pool, self.notebook_side, self._idle
        if self.fetch is not None:
            self.fetch.close()
        if side is not None:
            self.gradients.lose(side.table)
        self.pool = self.notebook_side = self.fetch = self._idle = self.parted_as = None
        if self.left_on_ranks:
            self.drop_left("it is gone with its ranks")
        self.deaths, self.failed_rank = [], None
        if idle is not None:
            idle.stop()
        if side is not None:
            side.close()
        if pool is not None:
            pool.close(kill=kill)

    def forget(self) -> None:
        """Let the ranks drop their twins, which after a failure are no longer what the notebook has."""
        assert self.pool is not None
        assert self.notebook_side is not None
        self.notebook_side.release_dropped()
        table = self.notebook_side.table
        keep = tuple(node.key for node in live_handles(table, worth=True))
        known = table.nodes.keys() - set(table.unreachable(keep)) - {node.key for node in live_handles(table)}
        forget = Forget(keep=keep, known=tuple(known), whole=not self._replaced)
        self.pool.send(forget, [info.rank for info in self.pool.ranks])
        self.gradients.lose(table, () if self.parted_as is not None or self._replaced else known)
        self.parted_as = None
        self._replaced = False
        self._new_side(keeps_handles=bool(keep))
        self._adopting.clear()

    def regroup(self, anew: Iterable[int] = ()) -> None:
        """Form a new process group, with new processes for these ranks; what the others hold lives on."""
        assert self.pool is not None
        assert self.notebook_side is not None
        anew = set(anew)
        self.deaths = [death for death in self.deaths if death.rank not in anew]
        if len(self.pool.ranks) > 1:
            self._ready.clear()
        self._adopting -= anew
        self._replaced |= bool(anew)
        if anew:
            self.environment = SentEnvironment(
                self.shell
            )  # the new ones have been told nothing of the kernel's environment
        if anew == {info.rank for info in self.pool.ranks}:
            report_lost(self.notebook_side, self.shell.user_ns)
        elif anew:
            report_partly_lost(self.notebook_side, self.shell.user_ns, anew)
        if self.fetch is not None:
            self.fetch.replaced(anew)
        self.pool.regroup(anew)

    def rest(self) -> None:
        """A cell is over: from now on the ranks are idle."""
        if self._idle is not None:
            self._idle.start()

    @contextmanager
    def kept_busy(self) -> Iterator[None]:
        """Inside, the ranks are not idle, although no cell runs."""
        if self._idle is not None:
            self._idle.stop()
        try:
            yield
        finally:
            self.rest()

    def _give_back(self) -> bool:
        """Called in the timer's thread: it may end processes, and must not touch sockets."""
        pool, side = self.pool, self.notebook_side
        if pool is None or side is None or self.left_on_ranks or live_handles(side.table, worth=True):
            return False
        pool.kill()
        return True

    # -- talking to ranks ----------------------------------------------------------------

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        if self.pool is not None:
            self.pool.send(message, ranks)

    def listen(self, seconds: float) -> list[Event]:
        """The events of the ranks; deaths and answers to an adoption are handled here."""
        with shielded():  # an event that was received is not sent again
            try:
                heard = [] if self.pool is None else self.pool.poll(seconds)
            except PoolError:
                self.lose()
                raise
            return [left for event in heard if (left := self._note(event)) is not None]

    def _note(self, event: Event | Death) -> Event | None:
        """The event if there is something left to do for the caller."""
        if isinstance(event, Death):
            self.deaths.append(event)
            return None
        if isinstance(event, Adopted):
            self._adopting.discard(event.rank)
            if self.notebook_side is not None:
                self.notebook_side.lacks(event.lacking)
            return None
        if isinstance(event, Pulled) and self.fetch is not None:
            self.fetch.missed(event)
        if isinstance(event, RankLocals):
            self._locals[event.rank] = event
            return None
        if isinstance(event, RankState) and event.state == "ready":
            self._ready.add(event.rank)
        return event

    def home(self, lead: int, home: HomeParcel, random_states: Any, together: bool, hold: bool = False) -> HomeParcel:
        """Bring home what the lead packed, `together` with the others if each has a piece. What cannot be made in the
        notebook stays on the rank, behind a handle. `hold`: have it here, and leave the notebook as it is."""
        assert self.notebook_side is not None
        left: set[int] = set()
        while True:
            try:
                if hold:
                    self.notebook_side.hold(lead, home)
                    return home
                touched = self.notebook_side.homecoming(lead, home, random_states)
            except Unmakeable as error:
                if error.key not in {key for key, _, _ in home.news} - left:
                    raise
                left.add(error.key)
                cause = error.__cause__
                why = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
                others = [rank for rank in self.notebook_side.readers if rank != lead] if together else []
                reason = f"it cannot be made in the notebook: {why}"
                self.send(Leave(key=error.key, reason=reason, together=together), [lead])
                self.send(Serve(lead=lead), others)
                home = self._repacked(lead, home)
            else:
                if self.fetch is not None:
                    self.fetch.attach(touched, lead)
                self._touched = touched if self.left is not None else []
                return home

    def _repacked(self, lead: int, before: HomeParcel) -> HomeParcel:
        """What the lead packs now. Nothing of the notebook is touched yet, so a second press on Stop ends the wait."""
        packed = sum(size for _, size in before.parcel.segments.values())
        patience, stop = AwakeTimeout(PACKS + packed / PER_SECOND), SecondPress()
        while True:
            for event in self.answers():
                if isinstance(event, Repacked):
                    home: HomeParcel = event.home
                    return home
            if stop.first():
                print("bringing the results back; press Stop again to discard them")
            if stop.second or patience.over:
                self.lose()
                if stop.second:
                    raise KeyboardInterrupt("discarded; the notebook is as it was before this cell")
                raise PoolError(
                    f"rank {lead} did not pack again what the cell has done, without what cannot be made in the "
                    "notebook, and was ended; the notebook is as it was before this cell"
                )

    def answers(self, asked: Iterable[int] | None = None) -> list[Event]:
        """Events while ranks are asked something between two cells; raises if one of these, or any, has died."""
        events = [*self.settle(), *self.listen(BEAT)]
        dead = {death.rank for death in self.deaths}
        if self.pool is None or (dead if asked is None else dead.intersection(asked)):
            deaths = self.deaths
            self.lose()
            raise self.died(deaths)
        return events

    def adopt(self, home: HomeParcel, ranks: list[int]) -> None:
        """Tell the others to find their own of the objects that the lead made. They answer later."""
        if (home.news or home.holders) and ranks:
            self._adopting.update(ranks)
            self.send(Adopt(news=home.news, holders=home.holders), ranks)

    def _dead(self) -> set[int]:
        self.listen(0)
        return {death.rank for death in self.deaths}

    def settle(self) -> list[Event]:
        """Wait until every rank has answered the last adoption; returns the other events of that time."""
        events: list[Event] = []
        patience = AwakeTimeout(LONG)
        while self._adopting and not self.deaths:
            events += self.listen(BEAT)
            if patience.over:
                ranks = ", ".join(map(str, sorted(self._adopting)))
                self.lose()
                raise PoolError(f"rank {ranks} did not answer between two cells and was ended; run the cell again")
        return events
