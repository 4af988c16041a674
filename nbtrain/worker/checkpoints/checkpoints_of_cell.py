"""The checkpoints of a cell: which objects it has, when one is due, and where its loops go on.

How they are written and read is in save_and_load.py, which is loaded with the first.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, ref

from nbtrain.base.errors import NbtrainError
from nbtrain.base.specs import RankInfo
from nbtrain.base.when_imported import if_imported
from nbtrain.strategies.base import Strategy
from nbtrain.worker.checkpoints.schedule import SaveSchedule
from nbtrain.worker.data.loop_position import LoopPositions
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.setup.components import Components

if TYPE_CHECKING:
    from nbtrain.worker.checkpoints.elastic_place import ElasticPlace
    from nbtrain.worker.checkpoints.save_and_load import SaveAndLoad


def nothing() -> None:
    """Called where nobody listens."""


class Checkpoints(Part):
    """Saves and loads on one rank, or in the notebook, where `components` is None."""

    running: ClassVar[Checkpoints | None] = None
    """of the cell that runs in this process"""
    taken: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
    """Steps of optimizers that do not count them, in earlier cells and before a checkpoint was loaded."""

    def __init__(
        self,
        info: RankInfo | None = None,
        strategy: Strategy | None = None,
        components: Components | None = None,
        randomness: Randomness | None = None,
        steps: Steps | None = None,
        scaling: Any = None,
    ) -> None:
        """`scaling`: what finds the loss scale, under 16-mixed: its `scale`, and for how many steps that was `good`."""
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self.strategy = strategy
        self.components = components
        self.randomness = randomness
        self.steps = steps
        self._work: SaveAndLoad | None = None
        self._answer: Callable[[int], None] | None = None
        self.positions = LoopPositions(randomness, lambda: 0 if steps is None else steps.calls, self.say)
        self._given: dict[str, Any] = {}
        """what the cell was given"""
        self._made: dict[str, ref[Any]] = {}
        """what it has made; weak references, as it may make one model after another"""
        self.scaling = scaling
        self.refused = ""
        """why there are no checkpoints in this cell"""
        self.off = False
        """nothing is written: the cell is a trial"""
        self.live_weights_folder = ""
        """where the notebook looks for the weights that it asks for in the middle of a cell"""
        self.elastic: ElasticPlace | None = None
        """where the run could go on, where that is asked for"""
        self._schedule: SaveSchedule | None = None
        self.saved = -1
        """the last step after which one was made"""
        self.said_unwritten = False
        """that a checkpoint of this cell's `--save-every` was not written was said"""
        self.resuming = False
        """the notebook has loaded a checkpoint from which no loop had gone on"""
        self.resumed = False
        """and now one has, in this cell, or another checkpoint was loaded in its place"""
        if steps is not None:
            self._stop, steps.ended = steps.ended, self._step_ended

    # --- per cell --------------------------------------------------------------------------------

    def begin(self, cell: Cell) -> None:
        objects, resume, schedule, steps = cell.objects, cell.run.resume, SaveSchedule.of(cell.run), self.steps
        assert steps is not None
        Checkpoints.running = self
        self.off, self.live_weights_folder = cell.trial is not None, cell.run.weights_folder
        if self._wrote:
            self.work.writing.leave_behind()  # by a cell that has failed: no wait here, where no interrupt is heard
        self._given, self._made = dict(objects), {}
        self._schedule, self.saved, self.said_unwritten = schedule, -1, False
        self.elastic, steps.noted, self.positions.noted = None, nothing, nothing
        self.refused = ""
        if self.world_size > 1 and self.strategy is not None and self.strategy.facts.hands_off:
            self.refused = (
                "under -s none nothing is known of what the ranks hold. Save with what shares it out there, or take "
                "another strategy"
            )
        elif cell.run.ranks is not None and len(cell.run.ranks) < self.world_size:
            self.refused = "it needs all ranks, and %%rank runs the cell on some. Write %%distributed"
        if schedule is not None and self.refused:
            self.say(f"no checkpoints are made in this cell: {self.refused}")
        elif schedule is not None:
            self.work.check_folder(schedule.to, objects)
        self._answer = None
        if cell.run.weights_folder:
            self._answer = self.work.answer_request  # loaded here, and not at the end of a step
        self.positions.begin()
        self.resuming, self.resumed = resume is not None, False
        if resume is not None:
            self.positions.go_on(pickle.loads(resume[1]))
        if cell.elastic:
            from nbtrain.worker.checkpoints.elastic_place import ElasticPlace

            self.elastic = ElasticPlace(self.positions, steps, self.in_use)
            steps.noted, self.positions.noted = self.elastic.stepped, self.elastic.at_boundary

    def add(self, objects: Mapping[str, Any]) -> None:
        """Add objects that the cell has made."""
        known = set(map(id, self.objects.values()))
        for name, item in objects.items():
            if id(item) not in known:
                self._made[f"{name}.{len(self._made)}"] = ref(item)

    def in_use(self) -> dict[str, Any]:
        """`objects`, without those that nothing else references any more."""
        if self.components is not None and self._made:
            self.components.sweep()
        return self.objects

    @property
    def objects(self) -> dict[str, Any]:
        """What the cell uses, by name."""
        alive = {name: item for name, reference in self._made.items() if (item := reference()) is not None}
        return {**self._given, **alive}

    def _step_ended(self) -> None:
        """Save if a checkpoint is due, then stop if that was asked for. All ranks come here after the same steps."""
        self.positions.noted()
        if self._schedule is not None and not self.refused:
            self.work.save_if_due(self._schedule)
        self._stop()

    def end(self, ok: bool) -> None:
        """The cell is over, however it ended: remember what optimizers have done. What is being written goes on."""
        Checkpoints.running = None
        if self.steps is not None:
            for optimizer, steps in list(self.steps.taken.items()):
                self.taken[optimizer] = self.taken.get(optimizer, 0) + steps
            self.steps.taken.clear()
        self._given, self._made = {}, {}
        self._schedule = None
        if self.elastic is not None:  # its place is that of this cell alone, whether or not a loop was left to begin
            self.positions.pending = []
        self.resumed |= self.resuming and (self.positions.used or self.elastic is not None)
        if self.resuming and not self.resumed:  # the next cell is told of it again
            self.positions.pending = []

    @property
    def _wrote(self) -> bool:
        """Whether this process has written or read a checkpoint, in whatever cell."""
        return if_imported("nbtrain.worker.checkpoints.save_and_load", "SaveAndLoad") is not None

    @property
    def work(self) -> SaveAndLoad:
        if self._work is None:
            from nbtrain.worker.checkpoints.save_and_load import SaveAndLoad

            self._work = SaveAndLoad(self)
        return self._work

    def answer_request(self, request: int) -> None:
        """Save the weights for the notebook, at the end of a step."""
        if self._answer is not None:
            self._answer(request)

    def late(self) -> NbtrainError | None:
        """Wait until the last checkpoint is written, and return its error. An earlier cell's error is only printed."""
        return self.work.late() if self._wrote else None

    def finish(self) -> None:
        """Wait until the last checkpoint is written, and raise its error."""
        if (error := self.late()) is not None:
            raise error

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(f"nbtrain: {line}", file=sys.stderr, flush=True)
