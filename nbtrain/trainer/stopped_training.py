"""Where a training was stopped, and how the next fit goes on from there. Nothing of it trains."""

from __future__ import annotations

from typing import Any

from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.saved_trainer import SavedTrainer
from nbtrain.training.checkpoints.api import current
from nbtrain.training.data.loop_position import LoaderPass


class StoppedTraining(SavedTrainer):
    """The part of a Trainer that counts batches, and knows which of them are done when its loop is left."""

    accumulates: bool

    def __init__(self) -> None:
        super().__init__()
        self.has_stepped = False
        self.resumes_from = ""
        self.resumes_by = ""
        """the arguments that this is restored with, as they are written"""
        self._before: Any = None
        """where the training is while it validates"""
        self._steps_before = 0
        """steps that optimizers had taken when the batch began"""
        self._batches_counted = 0
        """of the epoch"""
        self._batches_undone = 0
        """of these, those whose gradients were in no step when the training was stopped"""
        self._batches_lost = 0
        """the same, where the loader cannot give them again"""
        self._trained = False
        """all batches of the epoch were trained on"""
        self._epoch_length: int | None = None

    def _note_position(self) -> None:
        """Where the loader of this epoch is, while it is under way: it is not asked any more once the loop is left."""
        positions = current().positions
        found = positions.state()
        goes_on = found and found[0]["index"] == self.current_epoch - self.first_epoch and found[0].get("loaders")
        self._position = found if goes_on else []
        self._batches_undone = self._batches_lost = 0
        if goes_on:
            in_step = self._batches_in_steps()
            passes = positions.loops[0].opened
            is_stream = self.world_size > 1 and any(one.of is None for one in passes)  # it is counted in another way
            if not is_stream and _step_back(found[0]["loaders"], passes, self.batch_idx + 1 - in_step):
                self._batches_undone = max(self._batches_counted - in_step, 0)
            else:
                self._batches_lost = self.batch_idx + 1 - in_step

    def _forget_position(self) -> None:
        self._position, self._batches_undone, self._batches_lost = [], 0, 0

    def _batch_is_done(self) -> bool:
        """The batch under way: its step is taken, and it is not counted yet."""
        return self._batches_counted == self.batch_idx and self._steps_taken() > self._steps_before

    def _batches_in_steps(self) -> int:
        """Of the epoch. Gradients of others are lost with the loop: their batches are given again."""
        done = self._batches_counted + self._batch_is_done()
        is_whole = done == self._epoch_length or not self.accumulates
        return done if is_whole else done - done % self.accumulate_grad_batches

    def _stop_in_epoch(self) -> None:
        """The next fit goes on from here: this batch is done if its step is, and so is the epoch if all that is left
        of it is a validation. A loader that cannot say where it is begins its epoch anew."""
        self._in_epoch = False
        if self._before is None and self._batch_is_done():
            self.has_stepped = True
            self._count_batch()
        if self._trained:
            if self.averaging is not None and self.current_epoch >= self.averaging.first_epoch:
                self.print(f"the average is without the weights of epoch {self.current_epoch}, which was stopped")
            self._epochs_done = self.current_epoch = self.current_epoch + 1
            self._forget_position()
        elif self._position:
            self._batches_counted -= self._batches_undone
            self.batches_seen -= self._batches_undone
            if self._batches_lost:
                self.print(f"{self._batches_lost} batches were not finished, and cannot be given again by this loader")
        self._batches_left_at = self._batches_counted * self._shares() if self._position else 0

    def _go_on(self) -> None:
        """Where an earlier fit has stopped."""
        positions = current().positions
        if not self.resumes_from:
            self._note_others()
        if self._position or not self.resumes_from:
            positions.go_on(self._position)
        if self._position:
            self._batches_before = -(-self._batches_left_at // self._shares())

    def _steps_taken(self) -> int:
        runtime = runtime_here()
        return runtime.steps.total if runtime is not None else 0

    def _count_batch(self) -> None:
        self._batches_counted = self.batch_idx + 1
        self.batches_seen += 1
        self.global_step += self.has_stepped
        self._tell_module()


def _step_back(places: list[dict[str, Any]], passes: list[LoaderPass], batches: int) -> bool:
    """Where loaders were so many batches ago; False if that cannot be told: one of them has begun anew since."""
    under_way = [(place, one) for place, one in zip(places, passes, strict=True) if place["seen"] is not None]
    if any(place["seen"] < batches * one.each for place, one in under_way):
        return False
    for place, one in under_way:
        place["seen"] -= batches * one.each
    return True
