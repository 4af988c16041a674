"""The one object by which a worker runs cells under a strategy: an ordered list of parts, which it owns.

To add a part: one file with a class below `Part` (parts.py), and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nbtrain.base.specs import PRECISIONS, RankInfo, RunSpec
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Shards, Strategy, share_of
from nbtrain.worker.backward_and_step import BackwardAndStep
from nbtrain.worker.checkpoints import api
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.checkpoints.torch_save import TorchSave
from nbtrain.worker.data.loaders import Loaders
from nbtrain.worker.gradients.local_gradient_hooks import LocalGradientHooks
from nbtrain.worker.loop.learning_rate import ScaledRate
from nbtrain.worker.loop.schedule_lengths import ScheduleLengths
from nbtrain.worker.loop.shared_board import Board
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.loop.stopping import Stopping
from nbtrain.worker.measure.flop_count import FlopCount
from nbtrain.worker.measure.logged_values import LoggedValues
from nbtrain.worker.measure.phases import PhaseTimer, card_of
from nbtrain.worker.measure.readings import Readings
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.precision.activation_checkpointing import ActivationCheckpointing
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.ranks import collectives, loop_fixes
from nbtrain.worker.ranks.collective_guard import CollectiveGuard
from nbtrain.worker.ranks.collectives import Speakers
from nbtrain.worker.ranks.replica_checksums import ReplicaChecksums
from nbtrain.worker.ranks.training_threads import TrainingThreads
from nbtrain.worker.setup.components import Components, Replaced
from nbtrain.worker.setup.in_cell_models import InCellModels
from nbtrain.worker.setup.replace_references import replace_references
from nbtrain.worker.setup.weight_draws import WeightDraws
from nbtrain.worker.setup.whole import WholeTensors, whole

if TYPE_CHECKING:
    from nbtrain.worker.measure.trial_steps import TrialSteps
    from nbtrain.worker.precision.loss_scaling import LossScaling
    from nbtrain.worker.ranks.finished_gpu_steps import CardSteps

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
        self.info, self.strategy = info, strategy
        strategy.place = info
        self.device = device = torch.device(info.device)
        several, hands_off = info.world_size > 1, strategy.facts.hands_off
        self.cell: Cell | None = None
        """that runs"""
        self._prepared: Mapping[str, object] | None = None
        """the objects that `begin` follows for"""
        self._listeners = Listeners()

        self.steps = steps = Steps(info.rank)
        self.phases = phases = PhaseTimer(card_of(device))
        self.operations = FlopCount(phases, device, not strategy.facts.threads)
        self.randomness = drawn = randomness or Randomness(info.rank, info.world_size, device.type == "cuda")
        share = share_of(strategy, info.rank, info.world_size)
        drawn.index = info.rank if hands_off else share[0]
        drawn.alike = share[1] == 1 and not hands_off
        sets_up, low_precision, forwards = strategy, None, None
        self.scaling: LossScaling | None = None
        if precision != PRECISIONS[0]:
            from nbtrain.worker.precision.parts import precision_parts

            sets_up, low_precision, self.scaling, forwards = precision_parts(
                precision, strategy, device, info.rank, steps
            )
        self.components = components = Components(sets_up, device, info.world_size, replaced, precision)
        if low_precision is not None:
            low_precision.components = components
        self.threads = TrainingThreads(info.rank, several and not hands_off)
        self.stopping = Stopping(info.rank, steps)
        self.checkpoints = Checkpoints(info, strategy, components, drawn, steps, self.scaling)
        self.stopping.save_live_weights = self.checkpoints.answer_request
        positions = self.checkpoints.positions
        self.loaders = Loaders(drawn, steps, phases, device, info.rank, positions, components.models)
        self.rate = ScaledRate(steps, self.loaders)
        self.backward_and_step = step = BackwardAndStep(
            info, strategy, components, steps, phases, drawn, self.scaling, self.threads, self.loaders, self.rate
        )
        self.collective_guard = CollectiveGuard(info.rank, info.world_size, steps, phases, step.within, self.threads)
        self.card_steps: CardSteps | None = None
        if several and device.type == "cuda":
            from nbtrain.worker.ranks.finished_gpu_steps import CardSteps

            self.card_steps = CardSteps(steps)
        self.recompute = ActivationCheckpointing(several)
        self.in_cell_models = InCellModels(
            components, self.checkpoints, drawn, step, self.recompute, low_precision is not None
        )
        self.schedules = ScheduleLengths(steps, self.loaders)
        self.logged = LoggedValues(steps, log, collectives.reduce)
        self.readings = Readings(info.rank, steps, phases, self.operations, self.collective_guard.waits)
        self.replica_checksums = ReplicaChecksums(components, steps, drawn)

        # Parts begin in this order, and end in the opposite one.
        every: list[Part | None] = [
            steps,  # first: others begin to count from its zeros
            self.replica_checksums,
            low_precision,  # ends after the components: copies of models are gone by then
            self.loaders,
            components,  # ends after all that put something on models and optimizers has taken it off
            self.collective_guard,  # ends before the components, which meet when some ranks have not come to the end
            self.stopping,
            self.checkpoints,  # forgets what optimizers have stepped, which the rate reads as it ends
            self.card_steps,  # an event behind each step, and then what checkpoints note of it
            self.rate,
            step,
            TorchSave(self.collective_guard, several),
            self.schedules,
            self.logged,
            drawn,  # together from here on: what was set up before, and what a trial has recorded, draws apart
            self.in_cell_models,  # from here on what is made is the cell's, and no strategy's
            WeightDraws(drawn, components, self.in_cell_models),
            self.scaling,  # ends before accumulation, which clears what the last step has left
            forwards,
            self.recompute,
            self.readings,  # late: what comes before is no phase of the cell
            LocalGradientHooks(components, info.rank == 0),
            # Last, as a block that is open still is ended first, while all else runs.
            WholeTensors(components, step.settle, step.within, self.in_cell_models.set_up, drawn.as_one_process),
        ]
        self.parts = [part for part in every if part is not None]
        self._begin, self._advice, self._compared = map(self._all, ("begin", "advice", "compared"))
        self._end = self._all("end")[::-1]

    def _all(self, name: str) -> list[Any]:
        """This method of each part that has its own."""
        return [getattr(part, name) for part in self.parts if getattr(type(part), name) is not getattr(Part, name)]

    # --- per process -----------------------------------------------------------------------------

    def install(self) -> None:
        """Register all listeners, once. Another runtime of this process is uninstalled first."""
        global _installed
        if _installed is self:
            return
        if _installed is not None:
            _installed.uninstall()
        for part in self.parts:
            part.listen(self._listeners)
        _installed = self

    def uninstall(self, whole: bool = True) -> None:
        """Remove all listeners. `whole`: put models in pieces together again, which is collective."""
        global _installed
        try:
            if self.cell is not None:  # it was given up, and has not come to its end
                self.end(False)
            self.components.forget(whole)
        finally:
            if _installed is self:
                _installed = None
            self._listeners.close()

    # --- per cell --------------------------------------------------------------------------------

    def prepare(self, objects: Mapping[str, object], board: Board | None = None, number: int = 0) -> None:
        """Set up what the cell uses. Collective. `number`: the run's, the same on all ranks."""
        self.threads.begin()
        self.collective_guard.watch(board, number)
        self.components.prepare(objects)
        self._prepared = objects

    def begin(
        self,
        run: RunSpec,
        objects: Mapping[str, object],
        board: Board | None = None,
        number: int = 0,
        trial: TrialSteps | None = None,
    ) -> list[str]:
        """Before the cell runs; prepares `objects` if `prepare` has not. Returns sentences for the user. Collective."""
        if self._prepared is not objects:
            self.prepare(objects, board, number)
        self._prepared = None
        if trial is not None and (record := trial.trial.record) is not None:
            from nbtrain.worker.measure.step_record import StepRecord

            trial.record = StepRecord(record, self.info.rank, self.checkpoints.in_use)
        self.cell = cell = Cell(run, objects, self.info, self.strategy, board, number, trial)
        notes: list[str] = []
        for begin in self._begin:
            notes += begin(cell) or ()
        return notes

    def end(self, ok: bool) -> list[str]:
        """After the cell, whether it succeeded, failed or was refused. Returns sentences for the user. Every part ends,
        also where another one cannot."""
        self.cell, failed = None, None
        notes: list[str] = []
        for end in self._end:
            try:
                notes += end(ok) or ()
            except Exception as error:  # raised when all have ended
                failed = failed or error
        if failed is not None:
            raise failed
        return notes

    def explain(self, error: BaseException) -> None:
        """Put what a cell has raised into words that its user understands."""
        if not self.strategy.facts.hands_off:
            in_pieces = any(isinstance(one, Shards) for one in self.components.prepared)
            loop_fixes.explain(error, self.device, in_pieces)

    def advice(self, names: Mapping[str, object]) -> dict[str, str]:
        """Advice on the cell that has just ended, by name; the notebook shows each once."""
        stepped = self.steps.calls > 0
        said = [advice(names, stepped) for advice in self._advice]
        return {name: sentence for row in said for name, sentence in row.items() if sentence}

    def compared(self) -> dict[str, int]:
        """Numbers by name, which the notebook compares between ranks."""
        return {name: number for compared in self._compared for name, number in compared().items()}

    def builtins(self) -> dict[str, Any]:
        """The names every cell may use."""
        speakers = Speakers(self.strategy, self.info.rank, self.info.world_size).names()
        self.logged.reduce = speakers["reduce"]
        speakers["reduce"] = self.backward_and_step.autograd_gradients.reducing(speakers["reduce"])
        return {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "local_rank": self.info.local_rank,
            "device": self.device,
            "log": self.logged.log,
            **self.loaders.evaluations.watching(**speakers),
            "barrier": collectives.barrier,
            "setup": self.in_cell_models.setup,
            "whole": whole,
            "save": api.save,
            "load": api.load,
            "resumable": api.resumable,
        }
