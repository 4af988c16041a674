"""What a written loop calls in training: counting, logging, limits. None of it trains."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import UsageError
from nbtrain.trainer.logged_values import APART, LoggedValues
from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.module import has
from nbtrain.trainer.stopped_training import StoppedTraining
from nbtrain.training.checkpoints.api import current
from nbtrain.training.loop.steps import Stage

ALL = 1 << 62
"""of a loader's batches"""


class TrainingParts(StoppedTraining):
    """The part of a Trainer that its loop speaks to while it trains, on every rank."""

    limits: dict[str, Any]
    min_epochs: int | None
    min_steps: int | None
    log_every_n_steps: int
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    checks_nan: bool
    deterministic: Any
    benchmark: bool | None
    detect_anomaly: bool

    def __init__(self) -> None:
        super().__init__()
        self.should_stop = self.sanity_checking = self.interrupted = False
        self.stops = False
        """the epoch is the last one; `should_stop` may have to wait for `min_epochs` and `min_steps`"""
        self._outputs: list[list[Any]] = []
        self._fits = False
        self._began_at = 0.0

    def __deepcopy__(self, memo: Any) -> TrainingParts:
        """A copy of a module that is run, as for averages of weights, has the same trainer."""
        return self

    # -- where it is ---------------------------------------------------------------------------

    @property
    def in_epoch(self) -> bool:
        """Whether there is more of this epoch to come."""
        return self._in_epoch

    @property
    def validates_within_epochs(self) -> bool:
        return not (isinstance(self.val_check_interval, float) and self.val_check_interval == 1.0)

    def _seen_whole(self) -> AbstractContextManager[None]:
        runtime = runtime_here()
        return runtime.loaders.evaluations.seen_whole() if runtime is not None else nullcontext()

    def enter(self) -> None:
        if (runtime := runtime_here()) is not None:
            runtime.steps.stage_of = self._stage_of

    def leave(self, error: BaseException | None = None) -> None:
        """However the loop has ended: what only it used does not go home."""
        try:
            if error is not None:
                self.interrupted = isinstance(error, KeyboardInterrupt)
                if self._fits and self._in_epoch:
                    self._stop_in_epoch()
                elif self._fits:
                    self.current_epoch = self._epochs_done
                self._in_loop = False
                for one in self.callbacks:
                    if has(one, "on_exception"):
                        one.on_exception(self, self.module, error)
            self.call_loggers("finalize", "failed" if error is not None else "success")
        finally:
            self._let_go_of_the_run()

    def _let_go_of_the_run(self) -> None:
        if (runtime := runtime_here()) is not None:
            runtime.steps.stage_of = None
        self._batch = self._output = None
        self._outputs, self._hooks, self._logged = [], {}, {}
        self._new, self._for_loggers = {}, {}
        self.stage, self.sanity_checking, self._fits, self._in_loop = "", False, False, False
        self.untoggle_optimizer()
        self._before, self._batches_before, self._nothing_left = None, 0, False
        self._back_to_others()
        self.let_go()

    # -- training ------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        self.should_stop = self.stops = self.interrupted = self._in_epoch = False
        self._fits, self.batch_idx = True, -1
        self._go_on()
        self._began_at, self._judged_nan_at = time.monotonic(), 0.0
        self._epochs_done = max(self._epochs_done, self.first_epoch)
        self._tell_module()
        for one in (self.datamodule, self.module):
            if hparams := getattr(one, "hparams", None):
                self.call_loggers("log_hyperparams", hparams)
        self.call("on_fit_start")

    def begin_training(self) -> None:
        self.stage = "train"
        self.call("on_train_start")

    def begin_epoch(self, epoch: int) -> None:
        self.current_epoch, self._in_loop = epoch, True
        self.batch_idx = self._batches_before - 1
        self._batches_counted = self._batches_before
        self._in_epoch, self._trained, self._epoch_length = True, False, None
        self._forget_position()
        self._logged["train"] = LoggedValues("train")
        self._outputs = [[]]
        self._tell_module()
        self._tell_samplers()
        self.call("on_train_epoch_start")

    def batches(self, loader: Any, dataloader_idx: int = 0) -> Iterator[tuple[int, Any]]:
        """The loader's batches and their numbers, up to the limit. Of an evaluation every rank sees all."""
        self.dataloader_idx, before = dataloader_idx, 0
        if self.training:
            before, self._batches_before = self._batches_before, 0
        else:
            self._outputs.append([])
        with nullcontext() if self.training else self._seen_whole():
            numbers = range(before, self.limit(loader))
            iterator = iter(loader)
        if before and not current().positions.has_resumed():  # another loader, which begins anew
            before = 0
            numbers = range(self.limit(loader))
            self._batches_counted = 0
        found = is_over = False
        try:
            for batch_idx, batch in zip(numbers, iterator, strict=False):
                found = True
                self.batch_idx = batch_idx
                if self.training:
                    self._steps_before = self._steps_taken()
                self._batch = self._transferred(batch)
                self._call_batch("start")
                yield batch_idx, self._batch
                if self.training and self._ends(self.current_epoch):
                    break
            is_over = True
        finally:
            if self.training and is_over:
                self._trained = True
            elif self.training:
                self._note_position()
        self._batch, self.dataloader_idx = None, 0
        if not found and self.training and numbers and not before:
            raise UsageError("the training loader is empty: it gave no batch")

    def _stage_of(self, loader: Any) -> Stage:
        """What the progress line and the dashboard say of the loader whose iteration begins."""
        epochs = self.max_epochs if self.max_epochs is not None and self.max_epochs >= 0 else None
        name = self.stage if self.stage != "validation" or self._fits else "validate"
        try:
            most = self.limit(loader) if self.stage != "predict" else None
        except (TypeError, UsageError):  # a part of a stream, whose length nobody knows
            most = None
        return Stage(self.current_epoch, epochs, "" if self.training else name, most)

    def _transferred(self, batch: Any) -> Any:
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            for one in (self.datamodule, self.module):  # a data module's is in place of the module's
                if one is not None and has(one, name):
                    batch = getattr(one, name)(batch, self.dataloader_idx)
                    break
        return batch

    def limit(self, loader: Any) -> int:
        """How many batches count."""
        most = self.num_sanity_val_steps if self.sanity_checking and self.num_sanity_val_steps >= 0 else ALL
        limit = self.limits.get(self.stage)
        if isinstance(limit, float) and limit != 1.0:
            try:
                length = len(loader)
                limit = self._part(self.stage, length) if length else None  # an empty one is found to be so
            except TypeError:
                raise UsageError(
                    f"limit={limit} is a part of a loader that does not say how long it is: give a number of batches, "
                    "limit_train_batches=100, or write an IterableDataset with __len__"
                ) from None
        limit = None if isinstance(limit, float) else limit
        return most if limit is None else min(most, limit)

    def loss_of(self, output: Any) -> torch.Tensor:
        """The loss of what `training_step` has returned."""
        self.note_output(output)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            found = "nothing" if loss is None else type(loss).__name__
            if isinstance(output, dict) and loss is None:
                found = f"a dict without 'loss': {', '.join(map(repr, output))}"
            raise UsageError(
                f"training_step of {type(self.module).__name__} returned {found}: it returns the loss, or a dict with "
                "'loss'. To skip a batch, return 0 * loss"
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss that training_step returned has no gradient: it was detached, or computed without the "
                "module's parameters"
            )
        now = time.perf_counter()  # to look at a number waits for a GPU, so not at each
        looks = self.checks_nan and now - self._judged_nan_at > APART and not self._scales_losses()
        self._judged_nan_at = now if looks else self._judged_nan_at
        if looks and bool(torch.isnan(loss).any()):
            raise UsageError(
                f"the loss is NaN in epoch {self.current_epoch}, batch {self.batch_idx}. Trainer(detect_anomaly=True) "
                "says where it comes from; a smaller learning rate or gradient_clip_val=1.0 often helps"
            )
        self.has_stepped = not self.accumulates
        return loss

    def _scales_losses(self) -> bool:
        """In fp16: a step whose numbers are not finite is left out, and the training goes on."""
        runtime = runtime_here()
        return runtime is not None and runtime.components.precision == "16-mixed"

    def note_output(self, output: Any) -> None:
        """Of a step that steps by hand, too: whether it has is counted."""
        self._output = output
        self.has_stepped = self._steps_taken() > self._steps_before
        name = f"{'training' if self.training else self.stage}_epoch_end"
        if output is not None and self._outputs and has(self.module, name):
            self._outputs[-1].append(self._shown_output())

    def of_all_ranks(self, output: Any) -> Any:
        """What `training_step_end` is given: the outputs of all parts of the batch."""
        gather = getattr(builtins, "gather", None)
        if gather is None or self.world_size == 1:
            return output

        def whole(part: torch.Tensor) -> torch.Tensor:
            rows = part if part.ndim else part[None]
            return torch.cat(gather(rows, sync_grads=rows.requires_grad))

        return tree_map_only(torch.Tensor, whole, output)

    @property
    def begins_group(self) -> bool:
        """Of batches whose gradients are added up."""
        return self.batch_idx % self.accumulate_grad_batches == 0

    def ends_group(self, loader: Any) -> bool:
        done = self.batch_idx + 1
        self.has_stepped = done % self.accumulate_grad_batches == 0 or done == self._length(loader)
        return self.has_stepped

    def _length(self, loader: Any) -> int:
        """How many batches an epoch has. Asked for once in it: to find out how many are this rank's takes a while."""
        if self._epoch_length is not None:
            return self._epoch_length
        try:
            self._epoch_length = min(self.limit(loader), len(loader))
            return self._epoch_length
        except TypeError:
            raise UsageError(
                "accumulate_grad_batches, and a val_check_interval that is a part of an epoch, need the number of "
                "batches of the loader, which a stream does not have, nor does limit_train_batches=1000 give it: write "
                "an IterableDataset with __len__"
            ) from None

    def end_batch(self) -> None:
        if self.training:
            self._count_batch()
        self._call_batch("end")
        if self.training and self._logged["train"].is_time_to_draw():
            self._draw()
        if self.training and self._is_loggers_turn():
            self.to_loggers()

    def _is_loggers_turn(self) -> bool:
        every = self.log_every_n_steps
        return bool(self.loggers and every and self.has_stepped and self.global_step % every == 0)

    @property
    def validates_next(self) -> bool:
        """Whether a validation follows this batch, before the next one."""
        if not self.validates:
            return False
        if self.validates_within_epochs:
            return self.validation_is_due(self.train_dataloader)
        is_last = self.is_last_batch or 0 <= self.max_steps <= self.global_step
        return is_last and (self.current_epoch + 1) % (self.check_val_every_n_epoch or 1) == 0

    def validation_is_due(self, loader: Any) -> bool:
        every = self.val_check_interval
        if self.check_val_every_n_epoch is None:
            return self.batches_seen % int(every) == 0
        if (self.current_epoch + 1) % self.check_val_every_n_epoch:
            return False
        length = self._length(loader)
        number = max(1, int(length * every)) if isinstance(every, float) else every
        if number > length:
            raise UsageError(
                f"val_check_interval={every} is more than the {length} batches of an epoch, so that it would never be "
                "due: check_val_every_n_epoch=None counts them over epochs"
            )
        return (self.batch_idx + 1) % number == 0

    def end_epoch(self) -> None:
        """Metrics of the epoch, and what is called when it has ended."""
        for is_over in (False, True):
            self._take(self._logged["train"].of_epoch(self._summed, is_over), whole=True)
            if not is_over:
                if has(self.module, "training_epoch_end"):
                    self.module.training_epoch_end(self._outputs[0])
                self.call("on_train_epoch_end")  # may log, too
        self._draw()
        self.to_loggers()
        self.call("on_epoch_metrics")
        self.should_stop = bool(self._reduced(torch.tensor(float(self.should_stop)), "max"))
        self.stops = self._ends(self.current_epoch + 1)
        self._outputs = [[]]

    def _ends(self, epochs: int) -> bool:
        """Whether the training does. `epochs`: that are over."""
        is_short = epochs < (self.min_epochs or 0) or self.global_step < (self.min_steps or 0)
        return self._no_more_steps() or (self.should_stop and not is_short)

    def checkpoint(self) -> None:
        """Last in an epoch: what a checkpoint counts as done is done."""
        self._in_epoch, self._epochs_done = False, self.current_epoch + 1
        self._forget_position()
        self.call("on_checkpoint")
        self._fresh, self._validated = set(), False

    def end_training(self) -> None:
        self.current_epoch, self._in_loop = self._epochs_done, False
        self._tell_module()
        self.call("on_train_end")
        self.call("on_fit_end")

    def _no_more_steps(self) -> bool:
        if 0 <= self.max_steps <= self.global_step:
            return True
        if self.max_time is None:
            return False
        late = float(time.monotonic() - self._began_at > self.max_time)
        return self._reduced(torch.tensor(late), "max").item() > 0
