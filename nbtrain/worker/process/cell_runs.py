"""Runs the cells that the kernel sends: opens what came with one, has its code run, ends it, and sends it home."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.base.events import Finished, RankState
from nbtrain.base.messages import RunCell
from nbtrain.worker.home.pack_changes import KERNEL
from nbtrain.worker.process.rank_environment import BuiltinsGuard

if TYPE_CHECKING:
    from nbtrain.worker.home.aliases import Aliases
    from nbtrain.worker.measure.step_profile import StepProfile
    from nbtrain.worker.measure.trial_steps import TrialSteps

SETTLES = 2.0
"""Seconds for which a rank whose cell has failed waits for its GPU to do the steps that it has counted."""
Failure = tuple[BaseException | None, list[str]]
"""what a cell has failed with, and the lines that say so"""


class CellRuns:
    """One per rank."""

    def __init__(self, rank: Any) -> None:
        """`rank`: the one of worker/rank.py."""
        self._rank = rank
        self.last: tuple[RunCell, dict[str, Any]] | None = None
        """the last run, and the names it was given"""
        self.notes: tuple[str, ...] = ()
        """the last run's"""
        self._replaced: str | None = None
        """a sentence about builtins that the last cell replaced"""
        self._aliases: Aliases | None = None
        """of weights in pieces, while a cell runs"""
        self.trial: TrialSteps | None = None
        """set while a trial runs"""
        self.ended = False
        """the last cell came to its end by itself"""
        self.broken = False
        """ending the last cell failed"""
        self.regrouped = False
        """since the last cell: unreferenced models may keep the old group's threads and sockets alive"""

    def run(self, run: RunCell) -> None:
        debugging = self._rank.debugging
        if debugging.failed is not None:
            debugging.failed = None
            gc.collect()  # its frames may hold a loader's workers, in circles
        if run.spec.trial is None:
            self._run(run)
        else:
            self._try(run)
        if debugging.failed is not None:
            debugging.failed.clear_callers()

    def running(self) -> tuple[RunCell, int] | None:
        """The cell that runs, and how many collectives it has entered."""
        return None if self.last is None else (self.last[0], self._rank.runtime.now.collective_guard.count)

    def _try(self, run: RunCell) -> None:
        self.last = None  # what it holds would count for what was there before
        self._rank.shell.clear_last_error()
        from nbtrain.worker.measure.trial_steps import make_trial_steps

        self.trial = make_trial_steps(run.spec, self._rank.info.device)
        try:
            with self.trial.limited():
                self._run(run)
        finally:
            self.trial = None
            self._rank.shell.clear_last_error()

    def _run(self, run: RunCell) -> None:
        rank, trial, home, failing = self._rank, self.trial, self._rank.home, self._rank.failing
        self.last = None
        home.begin(run.ranks[0])
        try:
            names, running = self._prepare(run)
        except BaseException as error:  # also Stop: it is what the cell failed with
            lines = failing.lines_of(error)
            if rank.runtime.now is not None and rank.runtime.now.cell is not None:  # refused at the last moment
                self._end(error, lines)
            failing.fail(error, lines)
            return
        runtime = rank.runtime.now
        if rank.info.rank not in run.ranks:
            failure, lines = self._end(None, [])
            if failure is not None:
                failing.fail(failure, lines)
            else:
                rank.send_last(Finished(rank=rank.info.rank, time=time.time(), steps=0))
            return
        self.last = run, names
        hands_off, lead = runtime.strategy.facts.hands_off, rank.info.rank == run.ranks[0]
        # Whether what this rank displays is seen.
        shown = run.spec.trial is None and (lead or run.spec.output == "all")
        rank.outputs.outlet.begin(running, shows_widgets=shown)
        rank.meters.begin(runtime.readings.events, run.number)
        rank.group.begin(hands_off, run.number)
        rank.libraries.begin(run.spec.strategy, hands_off)
        profile = self._begin_profile(run) if run.spec.profile else None
        failure, lines = self._execute(run)
        if failure is None and (refused := runtime.threads.refused) is not None:
            failure, lines = refused, failing.lines_of(refused)
        if profile is not None:
            rank.link.send(profile.end())
        rank.libraries.end(self._models)
        rank.group.end()
        if trial is not None and trial.record is not None and trial.well(failure):
            try:
                said = runtime.schedules.sentences(rank.shell.user_ns, trial=True).values()
                trial.record.write(rank.shell.user_ns, runtime.randomness.drew(), said)
            except Exception as error:  # it is what the trial failed with
                failure, lines = error, failing.lines_of(error)
        failure, lines = self._end(failure, lines)
        if runtime.card_steps is not None:
            failure, lines = self._settle(failure, lines)
        rank.meters.end()
        self.ended = failure is None
        if trial is not None and trial.well(failure):
            told = trial.told(rank.info.rank)
            trial.release_loaders()
            rank.send_last(home.finished(tried=told))
        elif failure is not None:
            rank.outputs.outlet.announce()
            failing.fail(failure, lines, run.number)
        else:
            home.end(run, names)

    def _prepare(self, run: RunCell) -> tuple[dict[str, Any], RankState]:
        rank, twins, taken = self._rank, self._rank.twins, self._rank.taken
        complaints = taken.take(run.environment)
        again, gone = taken.refresh()
        rank.complain([*complaints, *gone])
        if again:  # what was prepared may call what is no more
            rank.runtime.close(True)
            rank.runtime.objects.clear()
        rank.shell.texts.learn(run.sources)
        twins.packer.released(KERNEL, run.released.get(rank.info.rank, ()))
        touched, names = twins.open(run.parcel, run.drop, run.unbind)
        rank.complain(taken.settle())
        spec = replace(run.spec, options=twins.options)
        runtime = rank.runtime.of(spec)
        if self.trial is not None:
            twins.namespace.update(self.trial.trial.names)
        if run.random_states is not None:
            runtime.randomness.adopt_packed(run.random_states)
        if touched:
            rank.say(RankState, state="preparing")
        runtime.components.retire(twins.holds)
        if self.regrouped:
            self.regrouped = False
            gc.collect()
        changed = bool(touched or run.drop or run.unbind)
        objects = rank.runtime.to_prepare({**names, **twins.modules}, changed)
        runtime.prepare(objects, rank.board, run.number)
        parted = twins.parted(runtime.components.pieces(), touched)
        twins.start([*touched, *parted], rank.info.rank == run.ranks[0])
        left = twins.objects(twins.with_gradients()).values() if run.gradients else ()
        runtime.backward_and_step.gradients_between_cells.begin(
            twins.objects(run.lost_gradients), left, twins.objects(run.notebook_gradients).values()
        )
        notes = runtime.begin(spec, objects, rank.board, run.number, self.trial)
        if twins.aliases:
            from nbtrain.worker.home.aliases import Aliases  # few cells have some

            self._aliases = Aliases()
            self._aliases.begin(twins.aliases, twins.table, runtime.components.prepared, twins.replace)
        if again:
            notes.append(f"changed on disk, loaded again: {', '.join(again)}")
        return names, RankState(rank=rank.info.rank, time=time.time(), state="running", notes=tuple(notes))

    def _begin_profile(self, run: RunCell) -> StepProfile:
        from nbtrain.worker.measure.step_profile import StepProfile

        profile = StepProfile(self._rank.info.rank, run.spec.profile, self._rank.config.directory)
        profile.begin(self._rank.runtime.now)
        return profile

    def _models(self) -> list[Any]:
        """Of this rank's names."""
        import torch

        return [one for one in self._rank.shell.user_ns.values() if isinstance(one, torch.nn.Module)]

    def _execute(self, run: RunCell) -> Failure:
        """Run the user's code. Only here are interrupts raised."""
        from nbtrain.worker.ranks.collective_guard import only

        rank, me, own = self._rank, os.getpid(), BuiltinsGuard()
        try:
            try:
                rank.interrupts.listen(run.number, run.sent)
                with only(run.ranks, rank.info.world_size):
                    play = rank.debugging.looking_for_nan if run.spec.detect_anomaly else rank.shell.run
                    failure, lines = play(run.code, run.filename, run.quiet)
                if failure is None and (late := rank.runtime.now.checkpoints.late()) is not None:
                    return late, rank.failing.lines_of(late)
                return failure, lines
            finally:
                if os.getpid() != me:  # a child that the cell forked has come to the end of the cell
                    os._exit(0)
                if rank.debugging.debugger is not None:
                    rank.debugging.end_cell()
                self._replaced = own.put_back()
                rank.interrupts.over()
                rank.outputs.take_back()
        except KeyboardInterrupt as interrupt:  # it came before the cell's first line or after its last
            rank.interrupts.ignore()
            return interrupt, []

    def _end(self, failure: BaseException | None, lines: list[str]) -> Failure:
        """End the runtime's cell; returns the failure, if any. An error in here is usually nbtrain's own: the cell
        fails, and the next one sets everything up anew."""
        try:
            said, self._replaced = self._replaced, None
            self.notes = (*self._rank.runtime.now.end(failure is None), *filter(None, [said]))
            if self._aliases is not None and failure is None:
                self._aliases.check(self._rank.runtime.now.components)
        except Exception as error:  # nbtrain's own, and reported as the cell's
            self.broken = True
            if failure is None:
                return error, self._rank.failing.lines_of(error)
        finally:
            if self._aliases is not None:
                self._aliases.end(self._rank.twins.replace)
                self._aliases = None
        return failure, lines

    def _settle(self, failure: BaseException | None, lines: list[str]) -> Failure:
        """Wait for the GPU: what the cell has asked of it may need ranks that will not come any more. After Stop all
        have asked for the same."""
        from nbtrain.worker.loop.stopping import Stopped
        from nbtrain.worker.ranks.finished_gpu_steps import GivenUp

        card_steps = self._rank.runtime.now.card_steps
        together = failure is None or isinstance(failure, Stopped)
        try:
            settled = card_steps.settle(None if together else SETTLES)
        except RuntimeError as error:  # the GPU can be used no more
            card_steps.cut = True
            return (error, self._rank.failing.lines_of(error)) if failure is None else (failure, lines)
        return (GivenUp(), []) if not settled and failure is None else (failure, lines)
