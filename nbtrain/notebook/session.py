"""All of nbtrain for one notebook, as the magics call it: run a cell (`run/`), start and stop ranks (`pool/`), say how
things are."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import nbtrain.machine.registry as registry
from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.base.humanize import listed
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.notebook import annexes
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.pool.pool_manager import PoolManager
from nbtrain.notebook.report.cell_report import report_lost
from nbtrain.notebook.run.cell_run import CellRun
from nbtrain.notebook.run.public_record import PublicRecord
from nbtrain.notebook.sync.captured_names import captured, check_kept, check_shown
from nbtrain.notebook.sync.patched_packages import PatchedPackages
from nbtrain.notebook.sync.stale_modules import StaleModules

if TYPE_CHECKING:
    from nbtrain.notebook.background.background_run import BackgroundRun, CellRefusal
    from nbtrain.notebook.sync.check_report import CheckReport

TRAINING = ("optim", "train", "fit", "compile", "tensor", "fsdp", "%run")
"""In the text of a cell that may need torch's compiler or its tensors in pieces."""


class Session:
    """One per notebook."""

    def __init__(self, shell: Any, on_idle: Callable[[], None] = lambda: None) -> None:
        """`on_idle` is called, from another thread, when idle ranks have given their GPUs back."""
        self.shell = shell
        self.ranks = PoolManager(shell)
        self.ranks.on_idle = on_idle
        self.stale_modules = StaleModules(shell)
        self._patched = PatchedPackages(shell)
        self._places = NameOrder(shell.user_ns)
        self.public_record = PublicRecord(shell.user_ns, self.ranks)
        self.background: BackgroundRun | None = None
        self._in_cell = False
        self._refusal: CellRefusal | None = None
        """of the cell that is about to run"""
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._between_cells)
        # Who forks ranks from a nursery has others to clean up; who spawns them has not.
        atexit.register(self._leave)

    def run(self, run: RunSpec, cell: Cell) -> BackgroundRun | None:
        """Run a cell; raises what it raised. In the background it returns the run."""
        self._check_free()

        def names_of(cell: Cell) -> Captured:
            return captured(cell, self.shell.user_ns, self._places, run)

        names = names_of(cell)
        check_kept(run.keep, names, self.shell.user_ns)
        if may_be_too_large(run) and (advice := annexes.ask("auto", names, self.shell.user_ns, run, self.ranks.pids)):
            run, said = advice
            if said:
                print(said)
        if run.pool.engine == "inprocess":
            from nbtrain.notebook.run import in_kernel

            in_kernel.run(self.shell, run, cell, names)
            return None
        check_shown(cell.code, self.shell.user_ns)
        forks = run.pool.start == "fork"  # then the ranks are copies of this process
        for line in (*self.stale_modules.lines(forks), *([] if forks else self._patched.lines())):
            print(line)
        if "torch" not in sys.modules and _trains_nothing(run, cell):
            run = replace(run, pool=replace(run.pool, early=True))
        if not run.elastic:
            return self._play(run, cell, names)
        from nbtrain.notebook.run.elastic_run import GoesOn, Stretches  # on use, as few cells need it

        stretches = Stretches(run, cell, self.shell.user_ns, names_of)
        while True:
            try:
                return self._play(stretches.run, stretches.cell, names_of(stretches.cell))
            except GoesOn as change:
                self.ranks.lose()
                print(stretches.go_on(change))

    def _play(self, run: RunSpec, cell: Cell, names: Captured) -> BackgroundRun | None:
        self._have(run.pool)
        going = CellRun(self.shell, self.ranks, run, cell, names, self.public_record.kernel)
        self.public_record.follow(going)
        if not run.background:
            try:
                going.run()
            finally:
                self.public_record.changed()
            return None
        from nbtrain.notebook.background.background_run import BackgroundRun

        background = BackgroundRun(going, self._when_idle)
        background.start()
        self.background = background
        return background

    @contextmanager
    def trial(self, spec: Callable[[], RunSpec] | None = None) -> Iterator[None]:
        """Around a trial: the ranks forget what they hold. Those that the notebook had, or that `spec` asks for, are
        started again while the user reads the result."""
        self._check_free()
        before = replace(self.ranks.pool.spec, early=False) if self.ranks.pool is not None else None
        if note := self.ranks.hold_step():
            print(note)
        if self.ranks.notebook_side is not None and self.ranks.notebook_side.ahead:
            names = listed(sorted(self.ranks.notebook_side.ahead))
            raise UsageError(
                f"{names}: what --keep has left on the ranks would be lost. Bring it home with a cell that reads "
                f"{names}, or discard it with %distributed stop"
            )
        for line in self.stale_modules.lines(forks=False):
            print(line)
        self.public_record.open()
        try:
            yield
        finally:
            try:
                wanted = before or (spec().pool if spec is not None else None)
                # Forks are copies of the kernel as it is now: the next cell forks anew.
                if wanted is not None and wanted.engine != "inprocess" and wanted.start != "fork":
                    with suppress(NbtrainError, OSError):  # the next cell says what is wrong
                        self.ranks.have(wanted)
                        self.ranks.rest()
            finally:
                self.public_record.changed()

    def start(self, pool: PoolSpec) -> None:
        """Have ranks before the first cell needs them."""
        self._check_free()
        if pool.engine == "inprocess":
            raise UsageError("--engine inprocess has no ranks to start: its cells run in the kernel")
        self._have(pool)
        self.ranks.wait_until_ready()
        self.public_record.changed()
        self.ranks.rest()

    def stop(self) -> None:
        if (run := self._going) is not None:
            with suppress(Exception):  # what it raised is shown below its cell
                run.stop()
        report_lost(self.ranks.notebook_side, self.shell.user_ns)
        if self.ranks.kept_step.run is not None:
            self.ranks.kept_step.drop("%distributed stop has discarded it")
        self.ranks.stop()
        self.public_record.close()  # there is nothing to be asked, and nothing is left if the kernel is killed

    def restart(self) -> None:
        self._check_free()
        if self.ranks.pool is not None:
            spec = replace(self.ranks.pool.spec, early=False)
            self.stop()
            from nbtrain.engines._local import warm

            if self.stale_modules.packages.moved:  # the nursery has imported some of them, too
                warm.close()
                self.stale_modules.packages.moved = False
            self.start(spec)

    def recover(self) -> str:
        """Bring home what the last failed cell has left on the ranks."""
        self._check_free()
        kept_step = self.ranks.kept_step
        if (run := kept_step.run) is None:
            return f"there is no kept step: {kept_step.why_none}"
        kept_step.drop("it could not be brought home")
        try:
            if changed := run.conclude():
                kept_step.run = run
                raise UsageError(
                    f"changed in the notebook since the cell failed: {listed(changed)}. What the cell left would take "
                    "that place. Keep what you need of it under another name, then write %distributed recover once more"
                )
            steps: int = run.recover()
            kept_step.why_none = "the notebook has it"
        finally:
            if kept_step.run is None and run.held is None:
                self.ranks.begin_anew()
        return f"the notebook has what the failed cell had done until step {steps:,}"

    def debug(self, rank: int | None) -> str | None:
        """Talk about the error of the last cell with this rank, or with the one whose error was shown. What is returned
        says why there is none."""
        from nbtrain.notebook.debugging.post_mortem import PostMortem

        self._check_free()
        ranks = self.ranks
        ranks.catch_up()
        rank = ranks.failed_rank if rank is None else rank
        if ranks.pool is None or rank is None:
            return "there is nothing to debug: the last distributed cell raised nothing, or its ranks are gone"
        if rank >= (count := len(ranks.pool.ranks)):
            raise UsageError(
                f"there is no rank {rank}; there {'is rank 0 only' if count == 1 else f'are 0 to {count - 1}'}"
            )
        ranks.settle()
        with ranks.kept_busy():
            return PostMortem(self.shell, ranks, rank).talk()

    def where(self, with_locals: bool = False) -> str:
        """Where the ranks are. While a cell runs this is called from another thread than the one that watches it."""
        if not self.ranks.running:
            self.ranks.catch_up()
        if self.ranks.pool is None:
            from nbtrain.notebook.pool.status import report

            return report(None, None)
        return "\n".join([*self.ranks.where(), *(self.ranks.locals() if with_locals else [])])

    def status(self) -> str:
        from nbtrain.notebook.pool.status import report

        if (run := self._going) is not None:
            return "\n".join([f"{run!r}", report(self.ranks.pool, self.ranks.notebook_side)])
        self.ranks.listen(0)
        dead = {death.rank for death in self.ranks.deaths}
        if self.ranks.pool is not None and len(dead) == len(self.ranks.pool.ranks):
            self.ranks.lose()
        return report(self.ranks.pool, self.ranks.notebook_side, dead)

    def check(self, names: list[str]) -> CheckReport:
        """Whether these names, or all, can travel; nothing is sent."""
        from nbtrain.notebook.sync.check_report import check

        if self._going is None:
            self.ranks.listen(0)
        return check(self.shell.user_ns, self.ranks.notebook_side, self.ranks.numbers(), names)

    def close(self) -> None:
        """Leave nothing behind: ranks, the process they are forked from, files."""
        self.shell.events.unregister("pre_run_cell", self._before_cell)
        self.shell.events.unregister("post_run_cell", self._between_cells)
        atexit.unregister(self._leave)
        self.stop()
        from nbtrain.engines._local import warm

        warm.close()

    def _have(self, pool: PoolSpec) -> None:
        for note in (self.ranks.hold_step(), self.ranks.have(pool)):
            if note:
                print(note)
        self.public_record.open()

    def _leave(self) -> None:
        """The kernel ends, and the ranks with it."""
        self.public_record.close()
        if (run := self._going) is not None:
            run.leave()
        self.ranks.stop()

    @property
    def _going(self) -> BackgroundRun | None:
        """The run in the background that uses the ranks, if there is one."""
        return None if self.background is None or self.background.over else self.background

    def is_busy(self) -> bool:
        """Whether a run in the background has the ranks; the work of one that has ended comes home."""
        if (run := self._going) is not None:
            run.finish()
        return self._going is not None

    def may_leave_ranks(self) -> None:
        """Raises where others in their place would end a run, or lose what only they have."""
        self._check_free()
        self.ranks.keep("this line")

    def _check_free(self) -> None:
        if self.background is not None and self.is_busy():
            from nbtrain.notebook.background.background_run import refuse

            raise refuse(self.background)

    def _when_idle(self, run: BackgroundRun) -> None:
        """Called in the thread of a run that has ended: bring home what it did as soon as no cell runs."""
        self.public_record.changed()
        loop = getattr(getattr(self.shell, "kernel", None), "io_loop", None)
        if loop is not None:
            loop.add_callback(self._finish, run)

    def _finish(self, run: BackgroundRun) -> None:
        if not self._in_cell:  # one that awaits lets this in, and must not see its names change
            run.finish()
            self.public_record.changed()

    def _before_cell(self, info: Any) -> None:
        self._in_cell = True
        if self._refusal is not None:
            self._refusal.leave()
            self._refusal = None
        if (run := self._going) is not None:
            try:
                run.before_cell(self.shell.transform_cell(info.raw_cell))
            except KeyboardInterrupt:  # IPython shows what its callbacks raise, and runs the cell all the same
                from nbtrain.notebook.background.background_run import CellRefusal

                self._refusal = CellRefusal(self.shell)
                self._refusal.enter()

    def _between_cells(self, *_: Any) -> None:
        self._in_cell = False
        if (run := self._going) is not None:
            run.finish()
            return
        self.stale_modules.look()
        side = self.ranks.notebook_side
        # `recover` may need what the user let go of.
        if side is not None and not self.ranks.kept_step.on_ranks:
            side.release_dropped()


def _trains_nothing(run: RunSpec, cell: Cell) -> bool:
    """Asked of a notebook that has not imported torch, and so has nothing to train yet: whether ranks need not wait for
    imports that take as long as torch's own. Where the cell trains all the same, each rank imports what is missing."""
    entry = registry.find_strategy(run.strategy)
    leaves_tensors = entry is not None and not entry.in_pieces
    return run.pool.start == "warm" and leaves_tensors and not any(word in cell.code for word in TRAINING)


def may_be_too_large(run: RunSpec) -> bool:
    """`auto` has chosen for several devices of this machine, each of which would hold the whole model."""
    plain = run.chosen and run.strategy == registry.AUTO[1] and not run.options and run.pool.machines is None
    return plain and run.pool.world_size > 1 and "torch" in sys.modules
