"""Starts, replaces and ends the ranks of one notebook, and keeps the exchange with them in step."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.host as host
import nbtrain.machine.registry as registry
from nbtrain.base.errors import PoolError, UsageError
from nbtrain.base.humanize import listed
from nbtrain.base.messages import Forget
from nbtrain.base.specs import PoolSpec, difference
from nbtrain.compat import widgets
from nbtrain.exchange.kinds.base import Node
from nbtrain.notebook.output.rank_widgets import RankWidgets
from nbtrain.notebook.pool.rank_talk import RankTalk
from nbtrain.notebook.report.cell_report import drop_ahead, report_lost, report_partly_lost
from nbtrain.notebook.sync.handles import Fetch
from nbtrain.notebook.sync.kept_handles import kept, live_handles
from nbtrain.notebook.sync.kernel_environment import SentEnvironment
from nbtrain.notebook.sync.notebook_side import NotebookSide
from nbtrain.notebook.sync.waiting_gradients import WaitingGradients

if TYPE_CHECKING:
    from nbtrain.notebook.pool.idle_release import IdleRelease
    from nbtrain.notebook.pool.other_versions import OtherVersions

TOO_MANY = (
    "the notebook has reached its limit of open files, and ranks need more. Close some, or allow more: "
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)), or ulimit -n 4096 before Jupyter starts"
)


class PoolManager(RankTalk):
    """At most one pool at a time. But for `wake`, all calls come from the kernel's main thread."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.environment = SentEnvironment(shell)
        self._versions: OtherVersions | None = None
        """what was said of packages on other machines"""
        self.on_idle: Callable[[], None] = lambda: None
        """called, from another thread, when idle ranks have given their GPUs back"""
        self.kept_step = KeptStep()
        self.failed_rank: int | None = None
        """the rank whose error was shown, as long as it keeps its frames"""
        self.advised: set[tuple[str, str]] = set()
        """what the user has been told once (cell_report.py)"""
        self.parted_as: Any = None
        """strategy and options under which the ranks keep models in pieces; None: they do not"""
        self.gradients = WaitingGradients()
        self.widgets = RankWidgets()
        self._idle: IdleRelease | None = None
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

    def keep(self, reason: str) -> None:
        """Raises where new ranks would lose what lives on the present ones only."""
        names = list(kept(self.notebook_side.table, self.shell.user_ns)) if self.notebook_side is not None else []
        if names:
            these = "this name" if len(names) == 1 else "these names"
            raise UsageError(
                f"{', '.join(names)}: what is behind {these} lives only on the "
                f"current ranks, and {reason} asks for new ones. Bring it home with {names[0]} = {names[0]}.pull(), "
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

    def _why_gone(self) -> str:
        from nbtrain.notebook.pool.idle_release import MINUTES

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
            from nbtrain.notebook.pool.idle_release import IdleRelease

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
        if self.kept_step.on_ranks:
            self.kept_step.drop("it is gone with its ranks")
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

    def begin_anew(self) -> None:
        """Let the ranks, if there are any, drop what they hold, also what --keep has left there."""
        if self.pool is not None:
            drop_ahead(self.notebook_side)
            self.forget()

    def hold_step(self) -> str:
        """Before the next cell: take what a failed run has left off the ranks. Returns a sentence."""
        if note := self.kept_step.hold():
            self.begin_anew()
        return note

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
            self.environment = SentEnvironment(self.shell)  # the new ones have been told nothing of the kernel's
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
        if pool is None or side is None or self.kept_step.on_ranks or live_handles(side.table, worth=True):
            return False
        pool.kill()
        return True


class KeptStep:
    """The last step of a failed cell, kept for `%distributed recover`: on its ranks until the next cell, then here."""

    def __init__(self) -> None:
        self.run: Any = None
        """the end of the failed run (`Homecoming`)"""
        self.why_none = "no cell has failed"
        self.touched: list[Node] = []
        """what the last cell has brought home, where a step is kept"""

    @property
    def on_ranks(self) -> bool:
        """Whether it is nowhere but there."""
        return self.run is not None and self.run.held is None

    def hold(self) -> str:
        """Take it off the ranks, which are to begin anew. Returns a sentence."""
        if not self.on_ranks:
            return ""
        run, self.run = self.run, None
        step = f"step {run.outcome.steps:,} of the failed cell"
        try:
            lost = run.hold()
        except Exception as error:  # a rank may raise anything while it packs; the next cell runs all the same
            why = str(error).partition("\n")[0]
            self.drop(f"{step} could not be packed ({why})")
            return f"nbtrain: {self.why_none}, and is discarded"
        self.run = run
        but = f", but for {listed(lost)}, which only its ranks had" if lost else ""
        return (
            f"nbtrain: {step} stays kept until another cell has trained the same objects to its end: "
            f"%distributed recover restores it{but}"
        )

    def drop_outdated(self) -> None:
        """A cell has taken steps and come to its end: a kept step of the same tensors is none to go back to."""
        if self.run is not None and self.run.held.holds_any(self.touched):
            self.drop("another cell has trained the same objects since")

    def drop(self, why: str) -> None:
        """`why` there is none any more."""
        self.run, self.why_none = None, why
