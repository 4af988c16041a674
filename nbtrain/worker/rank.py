"""The main loop of a rank: answers the kernel's messages, from the first to the last."""

from __future__ import annotations

import builtins
import gc
import math
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import nbtrain.compat.intercept as intercept
import nbtrain.machine.registry as registry
from nbtrain.base.errors import UsageError
from nbtrain.base.events import Adopted, Event, Finished, Pulled, RankState, Repacked
from nbtrain.base.messages import Adopt, Close, Conclude, Debug, Forget, Leave, Pull, Regroup, RunCell, Serve
from nbtrain.base.specs import RunSpec
from nbtrain.compat import kernel, lightning, strategy_packages
from nbtrain.exchange.graph.object_path import FoundObjects, find_all
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.worker.debugging.rank_debugging import RankDebugging
from nbtrain.worker.home.pack_changes import KERNEL, LIMIT, PackChanges
from nbtrain.worker.home.rank_side import RankSide
from nbtrain.worker.loop.shared_board import ABORT, LOCALS, OPEN, RAISED, TAKEN, Board
from nbtrain.worker.process import rank_imports
from nbtrain.worker.process.failure_report import FailureReport, card_is_lost, where_it_stood
from nbtrain.worker.process.interrupts import Interrupts
from nbtrain.worker.process.other_trainers import OtherTrainers
from nbtrain.worker.process.process_group import RankGroup
from nbtrain.worker.process.rank_channel import Link
from nbtrain.worker.process.rank_config import RankConfig, answer_in
from nbtrain.worker.process.rank_environment import (
    BuiltinsGuard,
    NotebookEnvironment,
    apply_environment,
    bind_device,
    unless_set,
)
from nbtrain.worker.shell.last_place import LastPlace
from nbtrain.worker.shell.meters import Meters
from nbtrain.worker.shell.output import Outputs
from nbtrain.worker.shell.rank_widgets import send_widgets
from nbtrain.worker.shell.shell import RankShell

if TYPE_CHECKING:
    from nbtrain.worker.measure.step_profile import StepProfile
    from nbtrain.worker.measure.trial_steps import TrialSteps

SETTLES = 2.0
"""Seconds for which a rank whose cell has failed waits for its GPU to do the steps that it has counted."""


class Rank:
    """One rank's process, once its shell exists."""

    def __init__(self, config: RankConfig, shell: RankShell, table: ObjectTable | None = None) -> None:
        self.config = config
        self.info = config.info
        self.link = Link(config.directory, config.info.rank, config.secret)
        self.board = Board.open(config.board, self.info.world_size)
        taken = self.board.parts[self.info.rank][TAKEN:]
        self.outputs = Outputs(self.info.rank, self.link.send, config.texts, (taken, taken[1:]))
        self.shell = shell
        shell.outlet = self.outputs.outlet
        send_widgets(self.outputs.outlet)
        shell.worth_showing = self._worth_showing
        self.group = RankGroup(self.info, config.backend, self.board, config.address)
        self.libraries = OtherTrainers(self.info)
        place = LastPlace(config.last_place)
        self.meters = Meters(self.info.rank, self.outputs, self.link.send, self._look_for_abort, place)
        self.twins = RankSide(self.info.rank, self.info.world_size, shell.user_ns, config.directory, self.info.device)
        if table is not None:
            self.twins.inherit(table)
        self.failing = FailureReport(self.info.rank, shell, self.twins)
        self.debugging = RankDebugging(self.info, shell, self.link, self.outputs, self.board, self._running)
        shell.stop_here = self.debugging.stop
        self.runtime: Any = None
        self._randomness: Any = None
        """every runtime's, one after another"""
        self._runs_as: Any = None
        self._found: dict[frozenset[tuple[str, int]], FoundObjects] = {}
        """names and what they hold → the objects that a strategy may prepare, for the last few cells"""
        self._last: tuple[RunCell, dict[str, Any]] | None = None
        """the last run, and the names it was given"""
        self._lead = 0
        """the rank whose changes come home"""
        self._notes: tuple[str, ...] = ()
        """the last run's"""
        self._replaced: str | None = None
        """a sentence about builtins that the last cell replaced"""
        self._told_locals = self.board.head[LOCALS]
        """the last request for locals that was answered"""
        self._gave_up = 0
        """the run whose collectives this rank has given up"""
        self._trial_steps: TrialSteps | None = None
        """set while a trial runs"""
        self._place: tuple[bytes | None, bool] = None, False
        """where an elastic run goes on, and whether the end of a step's body was left"""
        self._ended = False
        """the last cell came to its end by itself"""
        self._broken = False
        """ending the last cell failed"""
        self._early = config.early
        """not all that it may need is imported"""
        self._regrouped = False
        """since the last cell: unreferenced models may keep the old group's threads and sockets alive"""

    # -- messages -------------------------------------------------------------------------

    def serve(self) -> None:
        self.interrupts = Interrupts(self.board, self.info.rank)
        answer_in(self.config.stack)
        self._state("starting")
        try:
            self._set_up()
        except BaseException as error:  # an exit code alone would tell nobody why
            self._fail(error, self.failing.lines_of(error))
            raise
        gc.freeze()  # what was imported stays: a collection after a failed cell need not look at it
        self._state("ready")
        intercept.lay_aside()
        while True:
            message = self.link.receive()
            if self._early and type(message) is RunCell and not message.spec.pool.early:
                self._early = False
                for do in rank_imports.before_training():
                    do()
            with intercept.in_place():
                if type(message) is Close:
                    return self._close()
                try:
                    self._answer(message)
                except Exception as error:  # of ours: an exit code alone would tell nobody why
                    self._fail(error, self.failing.lines_of(error))
                    raise

    def _answer(self, message: Any) -> None:
        if self._broken:
            self._broken, self._last = False, None
            self._give_up_runtime()
        if type(message) is RunCell:
            if self.debugging.failed is not None:
                self.debugging.failed = None
                gc.collect()  # its frames may hold a loader's workers, in circles
            self._run(message)
            if self.debugging.failed is not None:
                self.debugging.failed.clear_callers()
        elif type(message) is Adopt:
            self._adopt(message)
        elif type(message) is Pull:
            self._pull(message)
        elif type(message) is Serve:
            self.twins.pieces.serve(message.lead)
        elif type(message) is Leave:
            home = self.twins.leave(message.key, message.reason, message.together)
            self.link.send(Repacked(rank=self.info.rank, time=time.time(), home=home))
        elif type(message) is Forget:
            self.twins.forget(self._close_runtime, message.keep, message.known, message.whole)
            self._found.clear()
        elif type(message) is Conclude:
            self.debugging.release(only_if_full=True)
            self._conclude(message.lead)
        elif type(message) is Debug:
            self.debugging.post_mortem()
        elif type(message) is Regroup:
            self.group.dissolve()
            self.group.form(message.store)
            self._regrouped = True
            self._state("ready")

    def _set_up(self) -> None:
        """Threads, device, process group: what makes this process a rank."""
        if not self._early:
            rank_imports.dtensor()  # there, but in a process that no nursery has forked
        run_id = os.path.basename(self.config.directory)
        config = self.config
        own = apply_environment(
            self.info, config.backend, config.environ, run_id, config.address, config.master, config.shares_cards
        )
        self.taken = NotebookEnvironment(self.shell, own, unless_set(self.info))
        bind_device(self.info, self.config.directory)
        lightning.tell_rank(self.info.rank)
        self.group.form(self.config.store)
        self.libraries.listen()
        self.debugging.listen()

    def _close(self) -> None:
        self._close_runtime(False)
        self.group.dissolve()
        self.outputs.finish()
        self.link.close()

    def _close_runtime(self, whole: bool) -> None:
        """`whole`: what is in pieces is put together again, which is collective."""
        if self.runtime is not None:
            self.runtime.uninstall(whole)
            self.runtime = self._runs_as = None

    def _give_up_runtime(self) -> None:
        """Its end has failed: take back what can be, and drop it, whatever fails."""
        with suppress(Exception):
            self._close_runtime(False)
        self.runtime = self._runs_as = None
        self._found.clear()

    # -- a cell --------------------------------------------------------------------------

    def _run(self, run: RunCell) -> None:
        if run.spec.trial is None:
            self._run_cell(run)
            return
        self._last = None  # what it holds would count for what was there before
        self.shell.clear_last_error()
        from nbtrain.worker.measure.trial_steps import make_trial_steps

        self._trial_steps = make_trial_steps(run.spec, self.info.device)
        try:
            with self._trial_steps.limited():
                self._run_cell(run)
        finally:
            self._trial_steps = None
            self.shell.clear_last_error()

    def _run_cell(self, run: RunCell) -> None:
        self._last, self._place = None, (None, False)
        self._lead = run.ranks[0]
        try:
            ready = self._prepare(run)
        except BaseException as error:  # also Stop: it is what the cell failed with
            lines = self.failing.lines_of(error)
            if self.runtime is not None and self.runtime.cell is not None:  # refused at the last moment
                self._end(error, lines)
            self._fail(error, lines)
            return
        names, lead, running = ready
        if self.info.rank not in run.ranks:
            failure, lines = self._end(None, [])
            if failure is not None:
                self._fail(failure, lines)
            else:
                self._finish(Finished(rank=self.info.rank, time=time.time(), steps=0))
            return
        self._last = run, names
        self.outputs.outlet.begin(running, shows_widgets=self._is_shown(run))
        self.meters.begin(self.runtime.readings.events, run.number)
        self.group.begin(self.runtime.strategy.facts.hands_off, run.number)
        self.libraries.begin(run.spec.strategy, self.runtime.strategy.facts.hands_off)
        profile = self._begin_profile(run) if run.spec.profile else None
        failure, lines = self._execute(run)
        if failure is None and (refused := self.runtime.threads.refused) is not None:
            failure, lines = refused, self.failing.lines_of(refused)
        if profile is not None:
            self.link.send(profile.end())
        self.libraries.end(self._models)
        self.group.end()
        if self._trial_steps is not None and self._trial_steps.record is not None and self._trial_steps.well(failure):
            try:
                said = self.runtime.schedules.sentences(self.shell.user_ns, trial=True).values()
                self._trial_steps.record.write(self.shell.user_ns, self.runtime.randomness.drew(), said)
            except Exception as error:  # it is what the trial failed with
                failure, lines = error, self.failing.lines_of(error)
        failure, lines = self._end(failure, lines)
        if self.runtime.card_steps is not None:
            failure, lines = self._settle(failure, lines)
        self.meters.end()
        self._ended = failure is None
        if self._trial_steps is not None and self._trial_steps.well(failure):
            told = self._trial_steps.told(self.info.rank)
            self._trial_steps.release_loaders()
            self._finish(self._finished(tried=told))
        elif failure is not None:
            self.outputs.outlet.announce()
            self._fail(failure, lines, run.number)
        elif self._shares_pieces(run):
            # All ranks are needed to bring it home: the kernel says so once each has come to the end of the cell.
            self._finish(self._finished(calls=self.runtime.steps.calls, waits=True))
        else:
            self._go_home(run, names, lead, together=False)

    def _is_shown(self, run: RunCell) -> bool:
        """Whether what this rank displays is seen."""
        return run.spec.trial is None and (self.info.rank == run.ranks[0] or run.spec.output == "all")

    def _begin_profile(self, run: RunCell) -> StepProfile:
        from nbtrain.worker.measure.step_profile import StepProfile

        profile = StepProfile(self.info.rank, run.spec.profile, self.config.directory)
        profile.begin(self.runtime)
        return profile

    def _end(self, failure: BaseException | None, lines: list[str]) -> tuple[BaseException | None, list[str]]:
        """End the runtime's cell; returns the failure, if any. An error in here is usually nbtrain's own: the cell
        fails, and the next one sets everything up anew."""
        try:
            said, self._replaced = self._replaced, None
            self._notes = (*self.runtime.end(failure is None), *filter(None, [said]))
        except Exception as error:  # nbtrain's own, and reported as the cell's
            self._broken = True
            if failure is None:
                return error, self.failing.lines_of(error)
        return failure, lines

    def _settle(self, failure: BaseException | None, lines: list[str]) -> tuple[BaseException | None, list[str]]:
        """Wait for the GPU: what the cell has asked of it may need ranks that will not come any more. After Stop all
        have asked for the same."""
        from nbtrain.worker.loop.stopping import Stopped
        from nbtrain.worker.ranks.card_steps import GivenUp

        together = failure is None or isinstance(failure, Stopped)
        try:
            settled = self.runtime.card_steps.settle(None if together else SETTLES)
        except RuntimeError as error:  # the GPU can be used no more
            self.runtime.card_steps.cut = True
            return (error, self.failing.lines_of(error)) if failure is None else (failure, lines)
        return (GivenUp(), []) if not settled and failure is None else (failure, lines)

    def _shares_pieces(self, run: RunCell) -> bool:
        """Whether no rank has the whole model, so that all of them must help to bring it home."""
        several = len(run.ranks) == self.info.world_size > 1
        return several and bool(self.twins.pieces or self.runtime.components.pieces())

    def _go_home(self, run: RunCell, names: dict[str, Any], lead: bool, together: bool) -> None:
        """Pack what the cell changed and send it. `together`: no rank has the whole of it."""
        try:
            limit = LIMIT if run.spec.pool.start != "fork" else math.inf
            if len(run.ranks) == self.info.world_size:
                self.twins.compare(self.runtime.components.pieces(), names)
            homeward = self.twins.homeward(names, run.spec.keep, limit)
            # Else no tensor need be asked: most warm cells train nothing.
            may_have_gradients = run.gradients or self.runtime.backward_and_step.ran_backward
            values = homeward.values(self.runtime.replica_checksums.weights) if len(run.ranks) > 1 else None
            finished = self._finished(
                home=self._home(homeward, run, lead, together),
                gradients=self.twins.with_gradients() if may_have_gradients else (),
                lost_gradients=tuple(self.runtime.backward_and_step.gradients_between_cells.lost.values()),
                random_states=self.runtime.randomness.collect_packed() if lead else None,
                replica_checksums=self.runtime.replica_checksums.take(homeward.rewritten(), homeward.checksum)
                if self.info.world_size > 1
                else None,
                values=values,
                edited=homeward.edited(self.runtime.replica_checksums.weights) if self._compares(run) else (),
                compared=self.runtime.compared() if len(run.ranks) == self.info.world_size > 1 else {},
                released=self.twins.released(),
                notes=(*self._notes, *self.twins.unsendable),
                advice=self.runtime.advice(self.shell.user_ns) if lead else {},
            )
        except Exception as error:  # what went wrong on the way home is the cell's failure: nothing has come home
            self._fail(error, self.failing.lines_of(error))
        else:
            self.outputs.finish()
            unsaid = self.outputs.outlet.unsaid()
            self.link.send(finished if unsaid is None else replace(finished, began=unsaid))
            if finished.steps and self.twins.pieces:
                self.twins.pieces.return_freed_memory()

    def _compares(self, run: RunCell) -> bool:
        """Whether what the cell has edited is to be the same on all ranks. Under `none` every rank has its own."""
        return len(run.ranks) == self.info.world_size > 1 and not self.runtime.strategy.facts.hands_off

    def _home(self, homeward: PackChanges, run: RunCell, lead: bool, together: bool) -> HomeParcel | None:
        if lead:
            home = homeward.pack(self.twins.packer, self.twins.pieces if together else None)
            if home.news or home.holders:  # as the others do when they adopt them
                self._found.clear()
            return home
        if together:
            self.twins.pieces.serve(self._lead)
        if self._compares(run):
            homeward.look()
        return None

    def _conclude(self, lead: int) -> None:
        """Bring the cell home: all ranks have ended it, or it was cut short and the notebook recovers what it did."""
        if self._last is None:
            error = UsageError("what the cell had done is gone with its end, which failed in nbtrain's own code")
            return self._fail(error, self.failing.lines_of(error))
        run, names = self._last
        if self.runtime.checkpoints.elastic is not None and not self._ended:
            self._place = self.runtime.checkpoints.elastic.go_back()
        self._lead = lead
        if lead == self.info.rank != run.ranks[0]:
            self.twins.become_lead()
        self._go_home(run, names, lead == self.info.rank, self._shares_pieces(run))

    def _look_for_abort(self, number: int) -> None:
        """Called in the meters' thread: give up the group once the kernel says that peers of this run will not come,
        and tell the locals once it asks for them."""
        if self.board.head[ABORT] == number != self._gave_up:
            self._gave_up = number
            if self.runtime is not None and self.runtime.card_steps is not None:
                self.runtime.card_steps.give_up()
            self.group.give_up()
        if self.board.head[LOCALS] != self._told_locals:
            self._told_locals = self.board.head[LOCALS]
            self.debugging.tell_locals(self._told_locals)

    def _execute(self, run: RunCell) -> tuple[BaseException | None, list[str]]:
        """Run the user's code. Only here are interrupts raised."""
        from nbtrain.worker.ranks.collective_guard import only

        me = os.getpid()
        own = BuiltinsGuard()
        try:
            try:
                self.interrupts.listen(run.number, run.sent)
                with only(run.ranks, self.info.world_size):
                    play = self._looking_for_nan if run.spec.detect_anomaly else self.shell.run
                    failure, lines = play(run.code, run.filename, run.quiet)
                if failure is None and (late := self.runtime.checkpoints.late()) is not None:
                    return late, self.failing.lines_of(late)
                return failure, lines
            finally:
                if os.getpid() != me:  # a child that the cell forked has come to the end of the cell
                    os._exit(0)
                if self.debugging.debugger is not None:
                    self.debugging.end_cell()
                self._replaced = own.put_back()
                self._is_over()
                self.outputs.take_back()
        except KeyboardInterrupt as interrupt:  # it came before the cell's first line or after its last
            self.interrupts.ignore()
            return interrupt, []

    def _looking_for_nan(self, *cell: Any) -> tuple[BaseException | None, list[str]]:
        """`shell.run` under `--detect-anomaly`."""
        from nbtrain.worker.debugging.anomalies import detected_anomalies

        with detected_anomalies(lambda: kernel.cell_names(self.shell) or {}):
            return self.shell.run(*cell)

    def _running(self) -> tuple[RunCell, int] | None:
        """The cell that runs, and how many collectives it has entered."""
        return None if self._last is None else (self._last[0], self.runtime.collective_guard.count)

    def _prepare(self, run: RunCell) -> tuple[dict[str, Any], bool, RankState]:
        complaints = self.taken.take(run.environment)
        again, gone = self.taken.refresh()
        if complaints or gone:
            self._complain([*complaints, *gone])
        if again:  # what was prepared may call what is no more
            self._close_runtime(True)
            self._found.clear()
        self.shell.texts.learn(run.sources)
        self.twins.packer.released(KERNEL, run.released.get(self.info.rank, ()))
        touched, names = self.twins.open(run.parcel, run.drop, run.unbind)
        if complaints := self.taken.settle():
            self._complain(complaints)
        spec = replace(run.spec, options=self.twins.options)
        runtime = self._runtime_for(spec)
        if self._trial_steps is not None:
            self.twins.namespace.update(self._trial_steps.trial.names)
        if run.random_states is not None:
            runtime.randomness.adopt_packed(run.random_states)
        if touched:
            self._state("preparing")
        runtime.components.retire(self.twins.holds)
        if self._regrouped:
            self._regrouped = False
            gc.collect()
        objects = self._objects({**names, **self.twins.modules}, bool(touched or run.drop or run.unbind))
        runtime.prepare(objects, self.board, run.number)
        parted = self.twins.parted(runtime.components.pieces())
        lead = self.info.rank == run.ranks[0]
        self.twins.start([*touched, *parted], lead)
        of = self.twins.objects
        left = of(self.twins.with_gradients()).values() if run.gradients else ()
        between = runtime.backward_and_step.gradients_between_cells
        between.begin(of(run.lost_gradients), left, of(run.notebook_gradients).values())
        notes = list(runtime.begin(spec, objects, self.board, run.number, self._trial_steps))
        if again:
            notes.append(f"changed on disk, loaded again: {', '.join(again)}")
        return names, lead, RankState(rank=self.info.rank, time=time.time(), state="running", notes=tuple(notes))

    def _models(self) -> list[Any]:
        """Of this rank's names."""
        import torch

        return [one for one in self.shell.user_ns.values() if isinstance(one, torch.nn.Module)]

    def _complain(self, lines: list[str]) -> None:
        for line in lines:
            self.outputs.outlet.write("stderr", line + "\n")

    def _objects(self, names: dict[str, Any], changed: bool) -> FoundObjects:
        """Every object that a strategy may prepare; searched again only when something changed: numbers and tensors,
        which most cells make anew, lead to none."""
        from nbtrain.worker.setup.components import PREPARABLE, RECENT

        asked = frozenset(
            (name, id(value))
            for name, value in names.items()
            if isinstance(value, PREPARABLE) or not self.twins.is_whole(value)
        )
        if changed:
            self._found.clear()
        if asked not in self._found:
            if len(self._found) == RECENT:
                del self._found[next(iter(self._found))]
            self._found[asked] = find_all(self.twins.table, names, PREPARABLE)
        return self._found[asked]

    def _runtime_for(self, spec: RunSpec) -> Any:
        """The runtime of this strategy; another strategy, other options or another precision mean another one."""
        from nbtrain.worker.runtime import Runtime

        # A class or object of the notebook's may be another one by now under the same name.
        found = registry.load_strategy(spec.strategy, self.shell.user_ns)
        runs_as = spec.strategy, dict(spec.options), found, spec.precision
        if self.runtime is None or runs_as != self._runs_as:
            self._close_runtime(True)
            strategy = registry.make_strategy(spec.strategy, spec.options, self.shell.user_ns)
            self.runtime = Runtime(
                self.info, strategy, self.outputs.outlet.log, self._randomness, self.twins.replace, spec.precision
            )
            self._randomness = self.runtime.randomness
            self.runtime.install()
            self._runs_as = runs_as
            for name, value in self.runtime.builtins().items():
                setattr(builtins, name, value)
        return self.runtime

    def _adopt(self, message: Adopt) -> None:
        lacking = self.twins.adopt(message.news, message.holders)
        self._found.clear()
        self.link.send(Adopted(rank=self.info.rank, time=time.time(), lacking=lacking))

    def _pull(self, message: Pull) -> None:
        self.twins.packer.released(KERNEL, message.released.get(self.info.rank, ()))
        try:
            parcel, reason = self.twins.pull(message.key, message.drop, message.together)
        except Exception as error:  # the object's own pickle method, or no memory left
            parcel, reason = None, f"{type(error).__name__}: {error}"
        rank = self.info.rank
        self.link.send(Pulled(rank=rank, time=time.time(), asked=message.asked, parcel=parcel, reason=reason))

    # -- what it says --------------------------------------------------------------------

    def _state(self, state: str) -> None:
        self.link.send(RankState(rank=self.info.rank, time=time.time(), state=state))

    def _finished(self, **more: Any) -> Finished:
        rank, steps, grouped = self.info.rank, self.runtime.steps.count, self.group.intact
        resumed = self.runtime.checkpoints.resumed
        return Finished(
            rank=rank, time=time.time(), steps=steps, grouped=grouped, place=self._place, resumed=resumed, **more
        )

    def _finish(self, event: Event) -> None:
        self.outputs.finish()
        self.link.send(event)

    def _fail(self, error: BaseException, lines: list[str], number: int = 0) -> None:
        """`number`: the run whose code raised."""
        failed = self.failing.told(error, lines, self._is_interruption(error))
        if number:
            pieces, intact = bool(self.twins.pieces), self.group.intact
            failed = where_it_stood(failed, error, self.runtime, pieces=pieces, grouped=intact)
            if self._trial_steps is None:
                self.debugging.keep(error, number)
        # Of several it has been waited for: `_settle`.
        if self.info.device.startswith("cuda") and card_is_lost(SETTLES if self.info.world_size == 1 else 0.0):
            failed = replace(failed, card_lost=True, whole=False)
        self._finish(failed)
        self.shell.clear_last_error()

    def _worth_showing(self, error: BaseException | None) -> bool:
        self._is_over()
        if self._trial_steps is not None and self._trial_steps.well(error):
            return False
        if error is not None and self.runtime is not None:
            self.runtime.explain(error)
        strategy_packages.explain(error)
        return not self._is_interruption(error)

    def _is_over(self) -> None:
        """The cell has ended: no more interrupts, and the kernel need not free this rank from a collective."""
        self.interrupts.ignore()
        part = self.board.parts[self.info.rank]
        part[OPEN] = -abs(part[OPEN])

    def _is_interruption(self, error: BaseException | None) -> bool:
        """Whether the kernel caused this error: an interrupt, or a collective that failed once peers were given up."""
        if self._last is None:
            return False
        number = self._last[0].number
        if isinstance(error, KeyboardInterrupt):  # the cell may raise one of its own
            return self.board.parts[self.info.rank][RAISED] == number
        # Another rank may have shut its end before this one's meters have looked. Under NCCL the group is gone then,
        # which torch calls a wrong value.
        of_group = isinstance(error, ValueError) and "process group" in str(error).lower()
        return (of_group or isinstance(error, RuntimeError)) and number in (self._gave_up, self.board.head[ABORT])
