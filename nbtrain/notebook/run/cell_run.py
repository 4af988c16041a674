"""One run of one cell: sends it, watches it until all ranks have ended, and brings it home (bring_home.py). Also says
where ranks wait for each other (`--hang-after`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import nbtrain.base.humanize as humanize
from nbtrain.base.awake_time import UnchangedTimer
from nbtrain.base.errors import CannotTravel, PoolError
from nbtrain.base.events import (
    DebugLeft,
    DebugPrompt,
    Display,
    Event,
    Failed,
    Finished,
    Memory,
    Output,
    Profiled,
    RankState,
    Widgets,
)
from nbtrain.base.keyboard_interrupts import presses
from nbtrain.base.messages import CellSource, RunCell
from nbtrain.base.specs import PRECISIONS, RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.machine import registry
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.output.blocked_kernel import BlockedKernel
from nbtrain.notebook.output.rank_output import Relay
from nbtrain.notebook.output.screens import screen_of
from nbtrain.notebook.pool.pool_manager import PoolManager
from nbtrain.notebook.pool.rank_talk import BEAT, starting
from nbtrain.notebook.report.cell_report import check_ahead, slow
from nbtrain.notebook.run.bring_home import Homecoming
from nbtrain.notebook.run.observers import Observers
from nbtrain.notebook.run.run_outcome import Outcome
from nbtrain.notebook.run.run_state import RunControls, RunState
from nbtrain.notebook.run.stop_ranks import StopRanks
from nbtrain.notebook.sync.handles import SLOW
from nbtrain.notebook.sync.notebook_side import NotebookSide, Outgoing

if TYPE_CHECKING:
    from nbtrain.notebook.debugging.breakpoint_prompts import BreakpointPrompts
    from nbtrain.notebook.run.elastic_run import ElasticHomecoming

LONG = 200_000_000
"""Nanoseconds after which a rank is taken to wait for one that Stop has ended, and not for one that is on its way."""
SOON = 0.01
"""Seconds to wait for an event where some rank waits for one that has ended."""
KEEP_ALIVE = 30.0
"""Seconds between two messages that show that a run in the background is alive."""


class CellRun(RunState):
    """Runs one cell on the ranks."""

    def __init__(
        self, shell: Any, ranks: PoolManager, run: RunSpec, cell: Cell, names: Captured, kernel: str = ""
    ) -> None:
        """`kernel`: its id, as the Jupyter server knows it."""
        count = run.pool.world_size
        outcome = Outcome(run.ranks if run.ranks is not None else tuple(range(count)), count)
        screen = screen_of(shell, run)
        relay = Relay(screen, run.output, outcome.lead, outcome.ranks, ranks.widgets)
        super().__init__(shell, ranks, run, cell, names, outcome, relay)
        self.controls = RunControls(self)
        self.observers = Observers(shell, run, cell, self.controls, kernel, relay.say, screen)
        relay.cleared = self.observers.view.cleared
        self._blocked_kernel = None if run.background else BlockedKernel(shell, self.observers.shows_through)
        self._running = False
        """the lead has begun"""
        self._sent = 0.0
        self._said_slow = self._said_hang = False
        self._waited = UnchangedTimer()
        self._profiles: dict[int, Profiled] = {}
        self._prompts: BreakpointPrompts | None = None
        """once a rank has stopped at a breakpoint"""
        self._kept_alive = 0.0
        self._early: list[Event] = []
        """events from before all ranks had the cell"""
        self._said = ""
        """first line of what it raised"""
        self._ok = False
        """all ranks have ended the cell, and nothing went wrong since"""
        self._at_home = ""
        """what went wrong after that"""
        self.home = Homecoming(self, self.take)
        if run.trial is not None:
            from nbtrain.notebook.run.discard_trial import DiscardTrial

            self.home = DiscardTrial(self, self.take)
        self._elastic: ElasticHomecoming | None = None
        if run.elastic and run.trial is None:
            from nbtrain.notebook.run.elastic_run import ElasticHomecoming  # on use, as few cells need it

            self.home = self._elastic = ElasticHomecoming(self, self.take)

    def run(self) -> None:
        """Run the cell and bring it home; raises what the cell raised."""
        with presses(self.once_shown) as self.presses, self.whole():
            self.begin()
            self.watch()
            self.finish()
        if self.presses.count and not self.stopped:
            raise KeyboardInterrupt("the cell had ended before it was stopped; all it did is in the notebook")

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around everything that a run does: however it ends, the next cell is not affected."""
        try:
            yield
        except BaseException as error:
            self._said = str(error).partition("\n")[0]
            if self._ok and not self.killed:
                self._at_home = self._said or type(error).__name__
            self._ok = False
            if self.ranks.kept_step.run is None:
                self.ranks.kept_step.why_none = self.home.why_not_kept
            if not self.over:  # a view or the screen failed, or Stop was pressed several times
                self.ranks.lose()
            raise
        finally:
            self.close()

    def begin(self) -> None:
        """Send the cell."""
        ranks = self.ranks
        self._early = ranks.settle()
        if ranks.deaths:
            self.relay.say(ranks.have(self.spec.pool))
        ranks.failed_rank = None
        self.presses.wake = ranks.wake
        self._send()
        self.observers.opened("")
        ranks.running = True

    def watch(self) -> None:
        """Wait until every rank has ended, in any thread; only this one may talk to them meanwhile."""
        self._watch(self._early)
        self._ok = len(self.outcome.finished) == self.spec.pool.world_size and not self.stopped
        if self.spec.background:  # the notebook may compute for long before it is told
            self.homeward = True
            if self.killed:
                self.observers.closed(False, killed=True)
            else:
                self.observers.ranks_ended()

    def finish(self) -> None:
        """Bring home what the cell did; raises what it raised. In the main thread."""
        self.ranks.running = False
        if self._profiles:
            self._say_profile()
        self.home.end(self._ok)
        self._ok |= self.home.came

    def close(self) -> None:
        ranks = self.ranks
        ranks.running = False
        self.controls.close()
        self.observers.closed(self._ok, self._said, killed=self.killed, at_home=self._at_home)
        self.relay.close(self._ok)
        if self.spec.pool.start == "fork":
            ranks.stop()
        ranks.rest()

    def _send(self) -> None:
        ranks, spec = self.ranks, self.spec
        forks = spec.pool.start == "fork"
        side = ranks.notebook_side
        if forks:
            side = NotebookSide(self.shell.user_ns, "", range(spec.pool.world_size), ranks.numbers())
        assert side is not None
        sources = [source] if (source := side.source(self.cell.filename)) is not None else []
        if ranks.parted_as not in (None, self.runs_as):  # pieces for one strategy are of no use to another
            check_ahead(side, ranks.parted_as)
            ranks.forget()
            side = ranks.notebook_side
            assert side is not None
        said = set(side.slow)
        try:
            out = side.outgoing(
                self.names.hard, self.names.soft, spec.options, everything_goes=forks, running=self.cell.filename
            )
            for line in side.unsendable:
                self.relay.say(line)
            for name in (side.slow.keys() - said) & self.shell.user_ns.keys():
                self.relay.say(slow(name, self.shell.user_ns[name], side.slow[name]))
            self.presses.only_count()  # from here on the ranks have the cell
            self._post(out, sources, side if forks else None)
        except CannotTravel:
            raise  # the walk has undone itself
        except BaseException as error:  # what was not sent must not count as sent
            ranks.lose() if forks or isinstance(error, PoolError) else ranks.forget()
            raise

    def _post(self, out: Outgoing, sources: list[CellSource], fork_with: NotebookSide | None) -> None:
        ranks, spec = self.ranks, self.spec
        if fork_with is not None:
            ranks.fork(spec.pool, fork_with)
        self._sent = time.monotonic()
        assert ranks.pool is not None
        assert ranks.notebook_side is not None
        number = self.number = ranks.next_run()
        self.ending = StopRanks(ranks.pool, number, self._say_where)
        self.weights_folder = spec.weights_folder or (ranks.pool.directory if spec.background else "")
        run = RunCell(
            number=number,
            spec=replace(spec, options={}, weights_folder=self.weights_folder),
            code=self.cell.code,
            filename=self.cell.filename,
            quiet=self.cell.quiet,
            sent=self._sent,
            ranks=self.outcome.ranks,
            parcel=out.parcel,
            drop=out.drop,
            unbind=out.unbind,
            released=out.released,
            random_states=out.random_states,
            sources=(*sources, *out.sources),
            gradients=bool(ranks.gradients.there),
            notebook_gradients=ranks.notebook_side.with_gradients(),
            lost_gradients=ranks.gradients.lost_keys(ranks.notebook_side.table),
            environment=ranks.environment.changes(registry.forms_no_group(spec.strategy)),
        )
        for line in ranks.environment.notes:
            self.relay.say(line)
        if spec.pool.machines is not None:
            for line in ranks.other_versions(self.cell.code, (*self.names.hard, *self.names.soft)):
                self.relay.say(line)
        self.over = False
        ranks.send(run, range(spec.pool.world_size))

    # -- while it runs -------------------------------------------------------------------

    @property
    def _left_alone(self) -> bool:
        """Whether a rank waits for one that Stop has ended; the others are on their way to the end of a step."""
        if not self.stopped or not self.outcome.failed:
            return False
        assert self.ending is not None
        since = time.monotonic_ns() - LONG
        return self.outcome.cut or any(wait and wait[0] < since for wait in self.ending.waits(self.open).values())

    def _watch(self, events: list[Event]) -> None:
        ranks, ending = self.ranks, self.ending
        assert ending is not None
        while True:
            for event in events:
                self.take(event)
            if self._blocked_kernel is not None:
                self._blocked_kernel.answer()
            if ranks.deaths:
                self.observers.dead([death.rank for death in ranks.deaths])
            left = self.open
            if not left or self.killed:
                return
            if self.presses.count and not ending.stopped:
                ending.stop(left)
            if self._elastic is not None and not ending.stopped and self._elastic.may_grow():
                self.growing = True
                ending.stop(left)
            if self._prompts is not None:
                self._prompts.serve(left, self.stopped, self._is_waiting)
            self._keep_alive()
            if self._running:  # a view counts from here on, without the start of ranks
                self.observers.tick(time.monotonic())
                self._say_hang()
            else:
                self._say_slow()
            fault = self.fault
            lost = fault or self._left_alone
            if ending.tick(left, lost, fault):
                return
            events = ranks.listen(BEAT if not lost else SOON)

    def take(self, event: Event) -> None:
        if isinstance(event, Output):
            self.relay.text(event)
            self.observers.feed.line(event.rank, event.text)
        elif isinstance(event, Display):
            self.relay.display(event)
        elif isinstance(event, Widgets):
            self.relay.widgets(event)
        else:
            if isinstance(event, Finished):
                self.outcome.finished[event.rank] = event
                if event.began is not None:
                    self.take(event.began)
            elif isinstance(event, Failed):
                if self.ranks.is_ready(event.rank):  # else it could not start: its death will be reported
                    self.outcome.failed[event.rank] = event
            elif isinstance(event, Memory):
                self.memory[event.rank] = event
            elif isinstance(event, RankState):
                if event.state == "starting" and self.ending is not None:
                    self.ending.late(event.rank)
                elif event.state == "running" and event.rank == self.outcome.lead:
                    self._say(event.notes)
            elif isinstance(event, Profiled):
                self._profiles[event.rank] = event
                return
            elif isinstance(event, DebugPrompt | DebugLeft):
                self._debug(event)
                return
            self.observers.receive(event)

    def _say_profile(self) -> None:
        from nbtrain.notebook.report.profile_report import profile_lines  # on use, as few cells ask for it

        try:
            lines = profile_lines(self._profiles, self.cell.number)
        except (OSError, ValueError, KeyError) as error:  # no room on the disk, or a trace that is cut short
            lines = [f"--profile: there is no trace: {type(error).__name__}: {error}"]
        for line in lines:
            self.relay.say(line)

    def _debug(self, event: DebugPrompt | DebugLeft) -> None:
        """A rank has stopped at a breakpoint, or goes on."""
        if self._prompts is None:
            from nbtrain.notebook.debugging.breakpoint_prompts import BreakpointPrompts

            self._prompts = BreakpointPrompts(self.ranks, self.spec.debug_ranks, self.relay.screen, self.presses)
        self._prompts.take(event)

    def _is_waiting(self, rank: int) -> bool:
        """Whether this rank waits for others in a collective."""
        return self.ending is not None and self.ending.waits({rank})[rank] is not None

    def _say(self, notes: tuple[str, ...]) -> None:
        """The first line of a run: strategy, ranks, devices, precision."""
        self._running = True
        pool = self.spec.pool
        count = f"{pool.world_size} rank{'s' * (pool.world_size > 1)}"
        if pool.nodes > 1:
            count += f" in {pool.nodes} nodes"
        ranks = self.outcome.ranks
        only = "" if self.outcome.everybody else f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} only"
        precision = "" if self.spec.precision == PRECISIONS[0] else self.spec.precision
        strategy = f"{self.spec.strategy} {humanize.flags(self.spec.options)}".rstrip()
        summary = " · ".join(part for part in (strategy, count, pool.where, precision, only, *notes) if part)
        self.observers.opened(summary)

    def _say_slow(self) -> None:
        """Say once what takes so long before the cell has begun."""
        pool = self.ranks.pool
        if self._said_slow or pool is None or time.monotonic() - self._sent < SLOW:
            return
        self._said_slow = True
        if not self.ranks.everybody_ready:
            self.relay.say(starting(self.spec.pool.world_size))
        else:
            self.relay.say("the ranks are putting in place what the cell reads …")

    def _keep_alive(self) -> None:
        """Keep a server that ends idle kernels from ending this one."""
        now = time.monotonic()
        if self.spec.background and now - self._kept_alive > KEEP_ALIVE:
            self._kept_alive = now
            self.relay.screen.keep_alive()

    def _say_where(self, ranks: set[int]) -> None:
        """Say what Stop is waiting for."""
        self.relay.say("\n".join(["still running:", *self.ranks.where(ranks), "Press Stop again to end these ranks."]))

    def _say_hang(self) -> None:
        """Say, once a cell, that some rank has waited for others for longer than `--hang-after`."""
        if self._said_hang or self.ending is None or self.stopped:
            return
        if self._prompts is not None and self._prompts.busy:  # they wait for the user
            self._waited = UnchangedTimer()
            return
        waits = self.ending.waits(self.open).items()
        longest = max((self._waited.seconds(rank, wait) for rank, wait in waits if wait is not None), default=0)
        if longest > self.spec.hang_after:
            self._said_hang = True
            after = f"--hang-after {self.spec.hang_after:g}"
            said = f"ranks appear stuck: they have waited for each other for {longest:.0f} s ({after}):"
            self.relay.say("\n".join([said, *self.ranks.where(), "The cell goes on; Stop ends it."]))
