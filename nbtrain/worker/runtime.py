"""The one object by which a worker runs cells under a strategy: it owns every part of `training`.

The parts listen to functions of torch (`replaced_functions.TABLE` says to which, and why) and to torch's two global
optimizer hooks, from `install` to `uninstall`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.events import Event
from nbtrain.base.events import Phases as Spent
from nbtrain.base.specs import RankInfo, Record, RunSpec
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.strategies.base import Shards, Strategy, share_of
from nbtrain.strategies.kit import written_numbers
from nbtrain.strategies.kit.random_draws import draw_from
from nbtrain.worker.backward_and_step import BackwardAndStep
from nbtrain.worker.checkpoints import api
from nbtrain.worker.checkpoints.api import resumable
from nbtrain.worker.checkpoints.live_weights import answer_request
from nbtrain.worker.checkpoints.save_and_load import Checkpoints
from nbtrain.worker.checkpoints.schedule import SaveSchedule
from nbtrain.worker.checkpoints.torch_save import TorchSave
from nbtrain.worker.data.batch_dealing import Deal, batch_notes
from nbtrain.worker.data.loaders import Loaders
from nbtrain.worker.gradients.local_gradient_hooks import LocalGradientHooks
from nbtrain.worker.loop import learning_rate
from nbtrain.worker.loop.accumulation import Accumulation
from nbtrain.worker.loop.schedule_lengths import Standing, short_schedules, standing
from nbtrain.worker.loop.shared_board import STEP, Board
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.loop.stopping import Stopping
from nbtrain.worker.measure.flop_count import FlopCount
from nbtrain.worker.measure.logged_again import LoggedAgain
from nbtrain.worker.measure.phases import PhaseTimer, card_of
from nbtrain.worker.measure.step_record import StepRecord
from nbtrain.worker.measure.trial_steps import TrialSteps
from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing
from nbtrain.worker.precision.autocast import Forwards, chosen
from nbtrain.worker.precision.loss_scaling import LossScaling
from nbtrain.worker.precision.low_precision_weights import LowPrecisionStrategy, LowPrecisionWeights
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.ranks import collectives, loop_fixes
from nbtrain.worker.ranks.card_steps import CardSteps
from nbtrain.worker.ranks.collective_guard import CollectiveGuard
from nbtrain.worker.ranks.collectives import Speakers
from nbtrain.worker.ranks.replica_checksums import ReplicaChecksums
from nbtrain.worker.ranks.training_threads import TrainingThreads
from nbtrain.worker.setup import whole as blocks
from nbtrain.worker.setup.components import Components, Replaced
from nbtrain.worker.setup.in_cell_models import InCellModels
from nbtrain.worker.setup.replace_references import replace_references
from nbtrain.worker.setup.weight_draws import WeightDraws
from nbtrain.worker.setup.whole import WholeTensors

_installed: Runtime | None = None


def installed() -> Runtime | None:
    """The one whose listeners are in place in this process."""
    return _installed


class Runtime:
    """Runs cells on a rank under one strategy: `install`, then `begin`, the cell, `end` for each."""

    def __init__(
        self,
        info: RankInfo,
        strategy: Strategy,
        log: Callable[[int, Mapping[str, float]], None],
        randomness: Randomness | None = None,
        replaced: Replaced = replace_references,
        precision: str = "32",
    ) -> None:
        """`log` takes a step and what the cell has logged in it. `randomness`: the previous runtime's. A rank's random
        states outlive a change of strategy, as the notebook sends its own only when they have changed. `replaced`:
        called with the pairs (old, new) of replaced tensors."""
        self.info = info
        self.several = info.world_size > 1
        self.strategy = strategy
        strategy.place = info
        self.log_values = log
        self.device = torch.device(info.device)
        self.steps = Steps(info.rank)
        self.phases = PhaseTimer(card_of(self.device))
        self.operations = FlopCount(self.phases, self.device, not strategy.facts.threads)
        self.randomness = randomness or Randomness(info.rank, info.world_size, self.device.type == "cuda")
        share = share_of(strategy, info.rank, info.world_size)
        self.randomness.index = info.rank if strategy.facts.hands_off else share[0]
        self.randomness.alike = share[1] == 1 and not strategy.facts.hands_off
        self.format = chosen(precision, strategy, self.device)
        self.low_precision: LowPrecisionWeights | None = None
        if self.format is not None and self.format.weights:
            self.low_precision = LowPrecisionWeights(self.format.dtype, info.rank)
        sets_up = strategy if self.low_precision is None else LowPrecisionStrategy(strategy, self.low_precision)
        self.components = Components(sets_up, self.device, info.world_size, replaced, precision)
        self.forwards = Forwards(self.format, self.device) if self.format else None
        self.scaling: LossScaling | None = None
        if self.forwards is not None and self.forwards.form.scaled:
            self.scaling = LossScaling(lambda: self._manages_models and self.several, lambda: self.steps.ends)
            self.forwards.before_model, self.forwards.after_model = self.scaling.before_model, self.scaling.after_model
        self.accumulation: Accumulation | None = None
        self.running = False
        self._cell: RunSpec | None = None
        """of the cell that runs, or ran last"""
        self.stopping = Stopping(info.rank, self.steps)
        self.checkpoints = Checkpoints(info, strategy, self.components, self.randomness, self.steps, self.scaling)
        positions, models = self.checkpoints.positions, self.components.models
        self.loaders = Loaders(self.randomness, self.steps, self.phases, self.device, info.rank, positions, models)
        self.threads = TrainingThreads(info.rank, self.several and not strategy.facts.hands_off)
        self.backward_and_step = BackwardAndStep(
            info, strategy, self.components, self.steps, self.phases, self.randomness, self.scaling, self.threads
        )
        self.whole_tensors = WholeTensors(
            self.components, lambda: self._cell if self.running else None, self.backward_and_step.settle,
            lambda: self.backward_and_step.within == STEP, self._set_up_in_cell, self._as_one_process,
        )  # fmt: skip
        self.gradient_hooks = LocalGradientHooks(self.components, info.rank == 0)
        self.collective_guard = CollectiveGuard(
            info.rank, info.world_size, self.steps, self.phases, lambda: self.backward_and_step.within, self.threads
        )
        self.card_steps = CardSteps() if self.several and self.device.type == "cuda" else None
        self.torch_save = TorchSave(self.collective_guard, self.several)
        self.recompute = ActivationCheckpointing()
        self.in_cell_models = InCellModels(lambda: self._manages_models, self._set_up_in_cell)
        self.loaders.on_own_batches = self.backward_and_step.redundant_work.shared
        self._manages_models = False
        """all ranks run the cell, and the strategy sets up its models"""
        self._batches, self._accumulated, self._rule = 1, 1, ""
        """batches of one process that make one step of the cell, those of one rank, and the --scale-lr rule"""
        self._rates: list[float] = []
        """learning rates of the optimizers that have stepped in the cell"""
        self._schedules: Standing = {}
        self._logged_apart = ""
        """the first name that was logged without `sync`"""
        self._made_in_cell = False
        """models or optimizers were set up that the cell has made"""
        self._in_a_step: LoggedAgain | None = None
        """how often names were logged; None: nothing was"""
        self.reduce_values: Callable[..., Any] = collectives.reduce
        self.weight_draws = WeightDraws(self.randomness, self.components, lambda: self._manages_models)
        self.trial_steps: TrialSteps | None = None
        """set while the cell is a trial"""
        self._replica_checksums = ReplicaChecksums(strategy.facts.hands_off)
        self._listeners = Listeners()
        self._prepared: Mapping[str, object] | None = None
        """the objects that `begin` follows for"""

    # --- per process -----------------------------------------------------------------------------

    def install(self) -> None:
        """Register all listeners, once. Another runtime of this process is uninstalled first."""
        global _installed
        if _installed is self:
            return
        if _installed is not None:
            _installed.uninstall()
        listeners = self._listeners
        for part in (self.forwards, self.scaling, self.low_precision):
            if part is not None:
                part.listen(listeners)
        self.backward_and_step.listen(listeners)
        if self.several:
            self.gradient_hooks.listen(listeners)
        self.loaders.listen(listeners)
        self.collective_guard.listen(listeners)
        if self.several or self.low_precision is not None:
            self.in_cell_models.listen(listeners)
        if self.several:
            self.weight_draws.listen(listeners)
            loop_fixes.listen(listeners, lambda: self.running and not self.strategy.facts.hands_off)
        self.torch_save.listen(listeners)
        _installed = self
        blocks.install(self.whole_tensors)

    def uninstall(self, whole: bool = True) -> None:
        """Remove all listeners. `whole`: put models in pieces together again, which is collective."""
        global _installed
        try:
            self.operations.end()  # a cell that was given up has not come to its end
            self.recompute.off()
            self.backward_and_step.rate.end()
            self.backward_and_step.gradients_between_cells.end()
            self._end_accumulation()
            self.components.forget(whole)
        finally:
            if _installed is self:
                _installed = None
                blocks.install(None)
            self._listeners.close()

    # --- per cell --------------------------------------------------------------------------------

    def prepare(self, objects: Mapping[str, object], board: Board | None = None, number: int = 0) -> None:
        """Set up what the cell uses. Collective. `number`: the run's, the same on all ranks."""
        self.threads.begin()
        self.collective_guard.begin(board, number)
        self.torch_save.begin()
        self.components.prepare(objects)
        self._prepared = objects

    def begin(
        self, run: RunSpec, objects: Mapping[str, object], board: Board | None = None, number: int = 0
    ) -> list[str]:
        """Before the cell runs; prepares `objects` if `prepare` has not. Returns sentences for the user. Collective."""
        if self._prepared is not objects:
            self.prepare(objects, board, number)
        self._prepared = None
        models = [item for item in objects.values() if isinstance(item, torch.nn.Module)]
        optimizers: list[Optimizer] = []
        scheduled = False
        for item in objects.values():
            if isinstance(item, Optimizer):
                optimizers.append(item)
            elif isinstance(item, LRScheduler):
                scheduled = True
        self.recompute.begin(() if self.strategy.facts.hands_off else run.checkpoint_activations, models)
        draw_from(self.randomness.one_process)
        written_numbers.begin()
        self.components.enter()
        index, count = share_of(self.strategy, self.info.rank, self.info.world_size) if run.sampler else (0, 1)
        deal = Deal(index=index, count=count, split=run.split_batches)
        if run.batches not in (0, count) and run.sampler and not run.split_batches:  # as with the ranks that began
            alone = count == 1
            deal = replace(deal, count=run.batches, whole=True) if alone else replace(deal, each=run.batches)
        if run.trial is not None and run.trial.record is not None and run.trial.record.stands_for:
            deal = replace(deal, count=run.trial.record.stands_for if run.sampler else 1, whole=True)
        self.steps.begin(optimizers)
        # Each rank has samples of its own.
        apart = self.strategy.facts.hands_off or not run.sampler or run.ranks is not None
        self.steps.part = 1.0 if apart else count / self.info.world_size
        self.stopping.begin(board, number)
        self.stopping.save_live_weights = partial(answer_request, self.checkpoints, run.weights_folder)
        self.loaders.begin(deal, self.strategy.facts.hands_off, run.share_eval)
        if run.accumulate > 1:
            self.accumulation = Accumulation(
                run.accumulate, lambda: self.steps.at_last_batch, lambda: self.components.prepared
            )
            self.accumulation.enter(optimizers)
        self.checkpoints.begin(objects, SaveSchedule.of(run), run.resume, run.ranks)
        machines = run.pool.machines
        elastic = machines is not None and machines.most is not None
        self.steps.noted = self.checkpoints.note_places().stepped if elastic else lambda: None
        if self.card_steps is not None:
            self.card_steps.begin(waits=elastic)
            self.steps.noted = self.card_steps.after_each(self.steps.noted)
        api.enter(self.checkpoints)
        self.running, self._cell = True, run
        self.backward_and_step.begin(self.accumulation)
        sharing = 1 if self.strategy.facts.hands_off or run.ranks is not None else count
        self.backward_and_step.redundant_work.begin(sharing > 1 and run.trial is None)
        self._logged_apart, self._in_a_step, self._made_in_cell = "", None, False
        self._schedules = standing(objects) if scheduled else {}
        self._rule = run.scale_lr
        self._accumulated = run.accumulate
        self._batches = run.accumulate * (1 if run.split_batches else deal.each or deal.count)
        self.backward_and_step.rate.begin(run.scale_lr, self._batches)
        self.backward_and_step.summed_losses.begin(sharing, run.split_batches)
        self.backward_and_step.autograd_gradients.begin(self.several and run.ranks is None and run.trial is None)
        if self.trial_steps is not None:
            self._begin_trial(self.trial_steps)
        if not self.strategy.facts.hands_off and run.ranks is None:
            self.in_cell_models.begin()
            self.weight_draws.begin()
            self._manages_models = self.several or self.low_precision is not None
            self.randomness.together()
        if self.scaling is not None:
            self.scaling.begin(optimizers)
        if self.forwards is not None:
            self.forwards.on = True
        self.recompute.on()
        self.phases.begin(bool(models or optimizers))
        self.operations.begin()
        if self.strategy.facts.hands_off:
            return []
        hooks = self.gradient_hooks.begin(objects)
        who = "ranks" if count == self.info.world_size else "groups of ranks"
        rates = learning_rate.notes(optimizers, run.scale_lr, self._batches)
        return [*batch_notes(objects, deal, run.accumulate, who), *rates, *self._notes(), *hooks]

    def end(self, ok: bool) -> list[str]:
        """After the cell, whether it succeeded or not. Returns sentences for the user."""
        if blocks.open_blocks:
            self.whole_tensors.end(ok)
        self.running = self._manages_models = False
        self._rates = learning_rate.rates(self.steps.taken) if self.steps.calls else []
        self.operations.end()
        self.phases.end()
        if self.card_steps is not None:
            self.card_steps.end()
        lost = self.backward_and_step.gradients_between_cells.end()
        self.backward_and_step.end()
        self.gradient_hooks.end()
        api.enter(None)
        self.checkpoints.end()
        self.checkpoints.off = self.torch_save.off = False
        self.trial_steps = None
        if self.forwards is not None:
            self.forwards.on = False
        notes = self.scaling.end(self.steps.calls) if self.scaling is not None else []
        self.recompute.off()
        self.randomness.apart(over=True)
        self.randomness.alone = self.info.world_size == 1
        self.stopping.end()
        self.collective_guard.end(ok)
        left_out = self._end_accumulation()
        if ok:
            notes += left_out
        if self._made_in_cell and ok:  # what one rank has held longer than the others is not compared
            self.components.sweep(models=False)
        self.components.leave()
        if self.low_precision is not None:
            self.low_precision.release(prepared.component for prepared in self.components.prepared)
        if self.loaders.evaluations.dealt:
            notes += self.backward_and_step.summed_losses.notes()
        return [*notes, *lost, *self.loaders.end()]

    def _end_accumulation(self) -> list[str]:
        accumulation, self.accumulation = self.accumulation, None
        return [] if accumulation is None else accumulation.leave()

    def explain(self, error: BaseException) -> None:
        """Put what a cell has raised into words that its user understands."""
        self.strategy.explain(error)
        if not self.strategy.facts.hands_off:
            in_pieces = any(isinstance(one, Shards) for one in self.components.prepared)
            loop_fixes.explain(error, self.device, in_pieces)

    def readings(self) -> list[Event]:
        """Events that say where the rank is: phase, throughput, progress. From any thread, also just after a cell."""
        rank, now = self.info.rank, time.time()
        waits = self.collective_guard.waits()
        spent = Spent(
            rank=rank,
            time=now,
            steps=self.steps.count,
            seconds=self.phases.seconds(),
            now=self.phases.word(self.steps.loading),
            within=waits,
        )
        throughput = replace(self.steps.throughput(), operations=self.operations.total, fastest=self.operations.fastest)
        progress = self.steps.progress()
        return [spent, throughput] if progress is None else [spent, throughput, progress]

    def recording(self, record: Record) -> StepRecord:
        """What records the steps of a trial."""
        return StepRecord(record, self.info.rank, self.checkpoints.in_use)

    def _begin_trial(self, trial_steps: TrialSteps) -> None:
        self.stopping.trial_over = trial_steps.ended
        self.checkpoints.off = self.torch_save.off = True
        if trial_steps.trial.batch != 1.0:
            self.loaders.regroup = trial_steps.regrouped
        if trial_steps.record is not None:
            trial_steps.record.share = self.loaders.deal.index
            self.loaders.record = self.backward_and_step.record = trial_steps.record
        trial_steps.begin(self.steps)
        if trial_steps.record is not None and trial_steps.record.keeps_order():
            self.randomness.alone = False

    def replica_checksums(
        self, rewritten: Set[int] = frozenset(), checksum: Callable[[torch.Tensor], int] = checksum
    ) -> list[tuple[str, int]]:
        """(name, checksum) pairs that must be equal on all ranks, of what may have changed since the last call."""
        every, reached = self.components.prepared, self.components.reached
        return self._replica_checksums.take(every, reached, self.steps.total, self.randomness, rewritten, checksum)

    def weights(self) -> set[int]:
        """Ids of the tensors whose bytes `replica_checksums` compares, or which a strategy keeps otherwise on each
        rank."""
        reached = self.components.reached
        held = {id(p) for one in reached for p in one.component.parameters()}
        return held | {id(tensor) for one in reached for _, tensor in one.replicas()}

    def schedules(self, namespace: Mapping[str, object], trial: bool = False) -> dict[str, str]:
        """Sentences on schedules that the cell has moved too little, by name. `trial`: it has run its first steps."""
        before, self._schedules = self._schedules, {}
        shared = (self.loaders.gave_shares and not self.strategy.facts.hands_off) or self._accumulated > 1
        if self._batches == 1 or not shared:
            return {}
        try:
            with self.loaders.evaluations.seen_whole():
                found = short_schedules(before, standing(namespace), self.steps, self._batches, trial)
        except Exception:  # a schedule of somebody's own may answer anything; a hint breaks no cell
            return {}
        return {f"schedule {one.name}": one.sentence(self._batches, self._accumulated) for one in found}

    def advice(self, namespace: Mapping[str, object]) -> dict[str, str]:
        """Advice on the cell that has just ended, by name; the notebook shows each once."""
        again = self._in_a_step.advice(self.steps.calls > 0) if self._in_a_step is not None else {}
        found = {**self.backward_and_step.gradients_between_cells.advice, **again}
        if self.steps.calls:
            found |= self.schedules(namespace)
        if self.info.world_size == 1:
            return {name: sentence for name, sentence in found.items() if sentence}
        if self.loaders.gave_shares and self.steps.calls and not self._rule:
            found["learning rate"] = learning_rate.advice(self._rates, self._batches)
        if self.loaders.gave_shares and self.steps.calls and self.backward_and_step.trains_batch_norm:
            found["batch norm"] = loop_fixes.BATCH_NORM
        if self._logged_apart and self._batches > 1 and not self.strategy.facts.hands_off:
            name = self._logged_apart
            found["log"] = f"log({name}=…) records one value per rank; log({name}=…, sync=True) records their mean"
        if self.steps.calls:
            found["checkpoints"] = self.recompute.whole()
        return {name: sentence for name, sentence in found.items() if sentence}

    def compared(self) -> dict[str, int]:
        """Numbers by name, which the notebook compares between ranks (session/report/cell_report.py)."""
        work, loaders = self.backward_and_step.redundant_work.number(), self.loaders
        every = (("work", work), ("data", loaders.data), ("stream", loaders.stream), ("drawn", loaders.drawn))
        found = {name: number for name, number in every if number}
        found |= self.backward_and_step.summed_losses.divisors()
        return found | self.backward_and_step.autograd_gradients.numbers()

    def builtins(self) -> dict[str, Any]:
        """The names every cell may use."""
        speakers = Speakers(self.strategy, self.info.rank, self.info.world_size).names()
        self.reduce_values = speakers["reduce"]
        speakers["reduce"] = self.backward_and_step.autograd_gradients.reducing(self.reduce_values)
        return {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "local_rank": self.info.local_rank,
            "device": self.device,
            "log": self.log,
            **self.loaders.evaluations.watching(**speakers),
            "barrier": collectives.barrier,
            "setup": self.setup,
            "whole": blocks.whole,
            "save": api.save,
            "load": api.load,
            "resumable": resumable,
        }

    # --- what the cell calls ---------------------------------------------------------------------

    def log(self, *unnamed: Any, sync: bool = False, **values: Any) -> None:
        """Show numbers on the run's chart: `log(loss=loss)`.

        They are each rank's own, of its own batch. `log(loss=loss, sync=True)`: the mean over the ranks; all of them
        have to call it.
        """
        if unnamed:
            raise UsageError("log() takes numbers by their names: log(loss=loss)")
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except OverflowError:  # a whole number beyond all floats
                numbers[name] = math.inf if value > 0 else -math.inf
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"log({name}=...) takes a number or a tensor with one element, not {type(value).__name__}"
                ) from None
        if sync:
            mean = self.reduce_values(torch.tensor(list(numbers.values()), dtype=torch.float64))
            numbers = dict(zip(numbers, mean.tolist(), strict=True))
        self._logged_apart = self._logged_apart or (next(iter(numbers), "") if not sync else "")
        if self._in_a_step is None:
            self._in_a_step = LoggedAgain()
        self._in_a_step.note(self.steps.count, numbers)
        self.log_values(self.steps.count, numbers)

    def setup(self, *objects: Any) -> Any:
        """Prepare what was made inside the cell, with rank 0's weights: `model, optimizer = setup(model, optimizer)`.

        Collective: every rank has to call it. The very same objects are returned.
        """
        blocks.refuse("setup()")
        self.recompute.learn(item for item in objects if isinstance(item, torch.nn.Module))
        named = {f"{type(item).__name__}#{i}": item for i, item in enumerate(objects)}
        self.components.prepare(named)
        self.checkpoints.add(named)
        if self.randomness.shared_states and not (self.randomness.alone or self.strategy.facts.hands_off):
            # Rank 0's weights count, so what it drew for them is what one process draws; the next order follows.
            state = self.randomness.one_process_state()
            collectives.equalise([state], checksum)
            self.randomness.set_one_process_state(state)
        if self.scaling is not None:
            self.scaling.look_again()
        if self.accumulation is not None:
            for item in objects:
                if isinstance(item, Optimizer):
                    self.accumulation.gate(item)
        return objects[0] if len(objects) == 1 else objects

    # --- what torch calls ------------------------------------------------------------------------

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """All ranks draw what one process would. Collective."""
        with ExitStack() as stack:
            for device in (torch.device("cpu"), *([self.device] if self.device.type == "cuda" else ())):
                stack.enter_context(self.randomness.one_process(device))
            yield

    def _set_up_in_cell(self, models: list[torch.nn.Module], optimizer: Optimizer) -> None:
        if self.whole_tensors.put_off(models, optimizer):
            return
        ready = self.components.is_ready(optimizer)
        if not ready or self.components.divides(optimizer):
            self._made_in_cell = True
            self.components.sweep_together(models=not ready)
            self.setup(*models, optimizer)
            copies = self.in_cell_models.alike(models, lambda p: id(p) in self.components.ready)
            counts = collectives.gather(len(copies))
            # A copy in pieces, too: the two meet in sums, as in an average of the weights.
            if any(counts) and any(is_divided(p) for model in models for p in model.parameters()):
                if len(set(counts)) > 1:
                    raise NotSupported(UNLIKE.format(name=type(models[0]).__name__))
                self.setup(*copies)
            elif len(set(counts)) == 1:  # an average may be kept on rank 0 alone
                collectives.equalise([t for copy in copies for t in (*copy.parameters(), *copy.buffers())], checksum)
        elif self.accumulation is not None:
            self.accumulation.gate(optimizer)

    def _notes(self) -> list[str]:
        """What the strategy says of how it has set components up, each once."""
        said = [note for prepared in self.components.prepared for note in prepared.notes]
        for prepared in self.components.prepared:
            prepared.notes = []
        return list(dict.fromkeys(said))


UNLIKE = (
    "some ranks have made a copy of {name} that others have not: under fsdp models and their copies are divided among "
    "all ranks, together. Copy it on every rank, or use --strategy ddp"
)
