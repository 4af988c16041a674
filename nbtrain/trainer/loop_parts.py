"""What a written loop calls: counting, logging, hooks, limits. None of it trains."""

from __future__ import annotations

import builtins
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import UsageError
from nbtrain.trainer.logged_values import APART, LoggedValues
from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.module import has
from nbtrain.trainer.module_functions import ModuleFunctions
from nbtrain.trainer.predictions import RankPredictions
from nbtrain.training.checkpoints.api import current, load, save
from nbtrain.training.data.metrics_alone import MetricsAlone
from nbtrain.training.data.whole_batches import WholeBatches
from nbtrain.training.loop.steps import Stage

ALL = 1 << 62
"""of a loader's batches"""
STATISTICS = "statistics"
"""the stage in which batch norm's are counted anew"""


class LoopParts(ModuleFunctions):
    """The half of a Trainer that its loop speaks to, on every rank."""

    callbacks: list[Any]
    averaging: Any
    """the callback that averages weights"""
    limits: dict[str, Any]
    min_epochs: int | None
    min_steps: int | None
    log_every_n_steps: int
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    accumulate_grad_batches: int
    accumulates: bool
    checks_nan: bool
    predictions_in_memory = 2 * 10**9
    """bytes that `predict` holds in memory; what is beyond them it writes to files"""

    def __init__(self) -> None:
        super().__init__()
        self.module: Any = None
        self.current_epoch = self.first_epoch = self.batch_idx = self.batches_seen = 0
        self.should_stop = False
        self.has_stepped = False
        self.sanity_checking = False
        self.resumes_from = ""
        self.keeps_predictions = True
        self.predictions: list[list[Any]] = []
        """of each loader, in order, on rank 0"""
        self.notes_samples = False
        """whether `predicted_samples` is wanted"""
        self.predicted_samples: list[torch.Tensor | None] = []
        """of each loader the indices of its samples, in the order of the predictions; None: they have none"""
        self.predictions_folder = ""
        self._kept: RankPredictions | None = None
        self._alone: MetricsAlone | None = None
        """while every rank has all samples"""
        self._before: Any = None
        """where the training is while it validates"""
        self._counted: list[str] = []
        """numbers that the module has of this trainer, and not of its own"""
        self._output: Any = None
        self._outputs: list[list[Any]] = []
        self._hooks: dict[str, list[Any]] = {}
        self._batches_before = 0
        """that all ranks together have seen of the epoch that a checkpoint was made in"""
        self._in_epoch = self._fits = False
        self._in_loop = False
        """over epochs: where it is, a checkpoint knows by itself"""
        self._goes_on_at: list[dict[str, Any]] | None = None
        """of a checkpoint that no loop over epochs was under way for: where the next one begins"""
        self._modes: list[tuple[Any, bool]] = []
        """of the module's parts, while an evaluation has put them into eval mode"""
        self._steps_before = 0
        """steps that optimizers had taken when the batch began"""
        self._batches_counted = 0
        """of the epoch"""
        self._position: list[dict[str, Any]] = []
        """where loops and loaders were when a training was stopped in the middle of an epoch"""
        self._batches_left_at = 0
        """how many batches all ranks together had seen of it"""
        self._trained = False
        """all batches of the epoch were trained on"""
        self.interrupted = self._restores = False
        self._epoch_length: int | None = None
        self._epochs_done = 0
        self._began_at = 0.0

    def __deepcopy__(self, memo: Any) -> LoopParts:
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
                self._in_loop = False
                for one in self.callbacks:
                    if has(one, "on_exception"):
                        one.on_exception(self, self.module, error)
            self.call_loggers("finalize", "failed" if error is not None else "success")
        finally:
            self._let_go_of_the_run()

    def _let_go_of_the_run(self) -> None:
        for one, mode in self._modes:
            one.training = mode
        self._modes = []
        if (runtime := runtime_here()) is not None:
            runtime.steps.stage_of = None
        self._batch = self._output = None
        self._outputs, self._hooks, self._logged, self._kept = [], {}, {}, None
        self._new, self._for_loggers = {}, {}
        self.stage, self.sanity_checking, self._fits, self._in_loop = "", False, False, False
        self.untoggle_optimizer()
        self._together_again()
        self._before = None
        self.let_go()

    def _together_again(self) -> None:
        if self._alone is not None:
            self._alone.end()
            self._alone = None

    # -- training ------------------------------------------------------------------------------

    def _note_position(self) -> None:
        """Where the loader of this epoch is, while it is under way: it is not asked any more once the loop is left."""
        found = current().positions.state()
        goes_on = found and found[0]["index"] == self.current_epoch - self.first_epoch and found[0].get("loaders")
        self._position = found if goes_on else []

    def _stop_in_epoch(self) -> None:
        """The next fit goes on from here: this batch is done if its step is, and so is the epoch if all that is left
        of it is a validation. A loader that cannot say where it is begins its epoch anew."""
        self._in_epoch = False
        in_batch = self._before is None and self._batches_counted == self.batch_idx
        if in_batch and self._steps_taken() > self._steps_before:
            self.has_stepped = True
            self._count_batch()
        if self._trained:
            self._epochs_done = self.current_epoch = self.current_epoch + 1
            self._position = []
        self._batches_left_at = self._batches_counted * self._shares() if self._position else 0

    def _go_on(self) -> None:
        if self._position:
            current().positions.go_on(self._position)
            self._batches_before = -(-self._batches_left_at // self._shares())

    def begin_fit(self) -> None:
        self.should_stop, self._fits, self.interrupted, self._in_epoch = False, True, False, False
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
        self._in_epoch, self._trained, self._epoch_length, self._position = True, False, None, []
        self._logged["train"] = LoggedValues("train")
        self._outputs = [[]]
        self._tell_module()
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
                self.batch_idx, self._batch = batch_idx, self._transferred(batch)
                if self.training:
                    self._steps_before = self._steps_taken()
                self._call_batch("start")
                yield batch_idx, self._batch
                if self.training and (self._no_more_steps() or (self.should_stop and not self._is_short())):
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
        if self.stage == STATISTICS:  # as many as the last epoch had
            return (self._seen_in_epoch + 1) * self._shares()
        limit = self.limits.get(self.stage)
        if isinstance(limit, float) and limit != 1.0:
            try:
                limit = int(len(loader) * limit)
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
        looks = self.checks_nan and now - self._judged_nan_at > APART
        self._judged_nan_at = now if looks else self._judged_nan_at
        if looks and bool(torch.isnan(loss).any()):
            raise UsageError(
                f"the loss is NaN in epoch {self.current_epoch}, batch {self.batch_idx}. Trainer(detect_anomaly=True) "
                "says where it comes from; a smaller learning rate or gradient_clip_val=1.0 often helps"
            )
        self.has_stepped = not self.accumulates
        return loss

    def note_output(self, output: Any) -> None:
        """Of a step that steps by hand, too: whether it has is counted."""
        self._output = output
        self.has_stepped = self._steps_taken() > self._steps_before
        name = f"{'training' if self.training else self.stage}_epoch_end"
        if output is not None and self._outputs and has(self.module, name):
            self._outputs[-1].append(self._shown_output())

    def _shown_output(self) -> Any:
        """What a step returned, as hooks are given it: a loss alone has its name."""
        output = self._output
        if self.training and isinstance(output, torch.Tensor):
            output = {"loss": output}
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def _steps_taken(self) -> int:
        runtime = runtime_here()
        return runtime.steps.total if runtime is not None else 0

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

    def _count_batch(self) -> None:
        self._batches_counted = self.batch_idx + 1
        self.batches_seen += 1
        self.global_step += self.has_stepped
        self._tell_module()

    def _is_loggers_turn(self) -> bool:
        every = self.log_every_n_steps
        return bool(self.loggers and every and self.has_stepped and self.global_step % every == 0)

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
        stops = bool(self._reduced(torch.tensor(float(self.should_stop)), "max"))
        self.should_stop = (stops and not self._is_short()) or self._no_more_steps()
        self._outputs = [[]]

    def _is_short(self) -> bool:
        """Of the epochs or steps that there are to be at least."""
        return self.current_epoch + 1 < (self.min_epochs or 0) or self.global_step < (self.min_steps or 0)

    def checkpoint(self) -> None:
        """Last in an epoch: what a checkpoint counts as done is done."""
        self._in_epoch, self._epochs_done = False, self.current_epoch + 1
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

    # -- averaged weights ----------------------------------------------------------------------

    def has_averaged(self, averaged: Any) -> bool:
        if averaged.n_averaged > 0:
            return True
        self.print("no epoch's weights were averaged: the training ended before the first that counts")
        return False

    @contextmanager
    def batch_statistics(self) -> Iterator[None]:
        """Batch norm's are counted anew, by the weights as they are. Every rank sees all batches of an epoch."""
        norms = [
            one for one in self.module.modules() if getattr(one, "running_mean", None) is not None and one.training
        ]
        momenta = [one.momentum for one in norms]
        before, self.stage = self.stage, STATISTICS
        metrics = dict(self.callback_metrics), dict(self.logged_metrics), dict(self._new), dict(self._for_loggers)
        self._seen_in_epoch, self._logged[STATISTICS] = self.batch_idx, LoggedValues(STATISTICS)
        for one in norms:
            one.reset_running_stats()
            one.momentum = None  # the mean of all batches
        try:
            yield
        finally:
            self.stage, self._batch = before, None
            self.callback_metrics, self.logged_metrics, self._new, self._for_loggers = metrics
            for one, momentum in zip(norms, momenta, strict=True):
                one.momentum = momentum

    # -- evaluation ----------------------------------------------------------------------------

    def begin_evaluation(self, stage: str) -> None:
        self._before = self.stage, self.batch_idx, self._batch, self._outputs
        if self._in_epoch and not self._trained:
            self._note_position()
        self.stage, self._batch, self._outputs = stage, None, []
        self._modes = [(one, one.training) for one in self.module.modules()]
        if has(self.module, f"on_{stage}_model_eval"):
            self.call(f"on_{stage}_model_eval")
        else:
            self.module.eval()
        self._alone = MetricsAlone(self.module.modules())
        self._logged[stage] = LoggedValues(stage)
        if stage == "predict":
            self.predictions, self.predicted_samples = [], []
        self.call(f"on_{stage}_start")
        self.call(f"on_{stage}_epoch_start")

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """A few batches of the validation, before hours of training end in its first error. Nothing remembers it."""
        metrics = dict(self.callback_metrics), dict(self.logged_metrics)
        runtime = runtime_here()
        states = runtime.randomness.state_dict() if runtime is not None else torch.get_rng_state()
        self.sanity_checking = True
        self.call("on_sanity_check_start")
        try:
            yield
        finally:
            self.sanity_checking = False
            self.callback_metrics, self.logged_metrics = metrics
            self._new, self._for_loggers, self._fresh, self._validated = {}, {}, set(), False
            if runtime is not None:
                runtime.randomness.load_state_dict(states)
            else:
                torch.set_rng_state(states)
        self.call("on_sanity_check_end")

    def end_evaluation(self) -> None:
        stage, logged = self.stage, self._logged[self.stage]
        self._take(logged.of_epoch(None, False), whole=True)
        if has(self.module, f"{stage}_epoch_end"):
            getattr(self.module, f"{stage}_epoch_end")(self._outputs[0] if len(self._outputs) == 1 else self._outputs)
        self.call(f"on_{stage}_epoch_end")
        self._take(logged.of_epoch(None, True), whole=True)
        self.loader_of = dict(logged.by_loader)
        self._together_again()
        if not self.sanity_checking:
            self._draw()
            self.to_loggers()
        self.call(f"on_{stage}_end")
        self._back_to_training(stage)
        self._go_back()
        self._validated = True
        if self.training and self.validates_within_epochs and not self.sanity_checking:
            self.call("on_epoch_metrics")
            self.call("on_checkpoint")
            self._fresh, self._validated = set(), False

    def _back_to_training(self, stage: str) -> None:
        """Layers that were frozen in eval mode stay so."""
        modes, self._modes = self._modes, []
        if modes and has(self.module, f"on_{stage}_model_train"):
            self.call(f"on_{stage}_model_train")
            return
        for one, mode in modes:
            one.training = mode

    def _go_back(self) -> None:
        self.stage, self.batch_idx, self._batch, self._outputs = self._before
        self._before = None

    def shared_batches(self, loader: Any, dataloader_idx: int = 0) -> Iterator[tuple[int, Any]]:
        """Of all batches those that this rank predicts, whole ones, so that each is what one process gives."""
        self.dataloader_idx = dataloader_idx
        kept = self._rank_predictions(dataloader_idx)
        self._kept = kept if self.keeps_predictions else None
        runtime = runtime_here()
        mine = (runtime.loaders.deal.index, runtime.loaders.deal.count) if runtime is not None else (0, 1)
        drawing = runtime.randomness.shared() if runtime is not None else None
        with self._seen_whole():
            dealt = WholeBatches(loader, self.limit(loader), mine, drawing)
            batches = iter(dealt)
        for batch_idx, batch in batches:
            self.batch_idx, self._batch = batch_idx, self._transferred(batch)
            self._call_batch("start")
            yield batch_idx, self._batch
        self._batch, self.dataloader_idx = None, 0
        if self.keeps_predictions:
            self.predictions.append(dealt.whole(kept.items))
        if self.notes_samples:
            orders = runtime.loaders.evaluations.orders if runtime is not None else None
            self.predicted_samples.append(dealt.samples(orders.indices(loader) if orders is not None else None))

    def _rank_predictions(self, dataloader_idx: int) -> RankPredictions:
        most = self.predictions_in_memory // self.world_size
        if self._kept is not None:  # of the loader before
            most = self._kept.left
        runtime = runtime_here()
        if runtime is not None and runtime.info.nodes > 1:  # a file of another machine is no use
            most = ALL
        return RankPredictions(Path(self.predictions_folder, f"loader_{dataloader_idx}"), most)

    def keep(self, prediction: Any) -> None:
        self._output = prediction
        self._call_batch("end")
        if self._kept is not None:
            self._kept.add(self.batch_idx, prediction)

    def end_predictions(self) -> None:
        self.call("on_predict_epoch_end")
        self.call("on_predict_end")
        self._together_again()
        self._back_to_training("predict")
        self._go_back()

    # -- hooks -----------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> None:
        """Callbacks first, then the module."""
        for one, is_callback in self._hooks_named(name):
            said = getattr(one, name)(*((self, self.module) if is_callback else ()), *args)
            if said == -1 and name == "on_train_batch_start":
                raise UsageError(
                    "on_train_batch_start returned -1: to end an epoch early set trainer.should_stop = True"
                )

    def _call_batch(self, when: str) -> None:
        name = f"on_{self.stage}_batch_{when}"
        if not self._hooks_named(name):
            return
        args: tuple[Any, ...] = (self._batch, self.batch_idx)
        if when == "end":
            args = (self._shown_output(), *args)
        if not self.training and self.dataloader_idx:
            args = (*args, self.dataloader_idx)
        self.call(name, *args)

    def _hooks_named(self, name: str) -> list[Any]:
        if name not in self._hooks:
            self._hooks[name] = [
                (one, one is not self.module) for one in (*self.callbacks, self.module) if has(one, name)
            ]
        return self._hooks[name]

    def numbers_of_module(self, names: list[str]) -> None:
        """Of these the module has ours, which are to be up to date."""
        self._counted = names

    def _tell_module(self) -> None:
        for name in self._counted:
            self.module.__dict__[name] = getattr(self, name)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        """A checkpoint from which any strategy goes on, with the trainer's own counters and callbacks.
        `weights_only`: the module alone."""
        if weights_only:
            save(path, model=self.module, trainer=_Hyperparameters(self._hyperparameters()))
        else:
            save(path, **self._held())

    def restore(self, path: str) -> None:
        if Path(path).is_file():
            raise UsageError(
                f"{path} is a file, and a Trainer's checkpoint a folder. To go on from the weights of Lightning's: "
                "nbtrain.load(path, model=module), then fit without ckpt_path"
            )
        self._restores = True
        try:
            load(path, **self._held())
        finally:
            self._restores = False
        if self._goes_on_at is not None:
            current().positions.go_on(self._goes_on_at)

    def restore_weights(self, path: str) -> None:
        load(path, model=self.module)

    def _held(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.module}
        for kind, held in (("optimizer", self.optimizers), ("scheduler", [one.scheduler for one in self.schedules])):
            found |= {f"{kind}-{number}" if number else kind: one for number, one in enumerate(held)}
        if self.averaging is not None:
            found["average"] = self.averaging.average
        return found | {"trainer": _Counters(self)}

    def _shares(self) -> int:
        """How many batches a step of all ranks takes."""
        runtime = runtime_here()
        if runtime is None or runtime.loaders.hands_off:
            return 1
        return int(runtime.loaders.deal.at_a_time)

    def counters(self) -> dict[str, Any]:
        """All that a checkpoint has of it."""
        if self._restores:  # only asked for its form
            return {}
        module: dict[str, Any] = {}
        if has(self.module, "on_save_checkpoint"):
            self.module.on_save_checkpoint(module)
        more: list[tuple[str, dict[str, Any]]] = []
        for one in self.callbacks:
            if has(one, "on_save_checkpoint"):
                more.append((type(one).__name__, {}))
                one.on_save_checkpoint(self, self.module, more[-1][1])
        return {
            "epoch": self.current_epoch, "global_step": self.global_step,
            "first_epoch": self.first_epoch if self._in_loop or self._position else self.current_epoch,
            "batches": (self.batch_idx + 1) * self._shares() if self._in_epoch else self._batches_in_position(),
            "position": None if self._in_loop else self._position,
            "batches_seen": self.batches_seen, "module": module, "of_callbacks": more,
            "hparams": self._hyperparameters(),
            "callbacks": [(type(one).__name__, one.state_dict()) for one in self.callbacks if has(one, "state_dict")],
        }  # fmt: skip

    def _batches_in_position(self) -> int:
        return self._batches_left_at if self._position and not self._in_loop else 0

    def _hyperparameters(self) -> dict[str, Any]:
        """Of the module, those that a checkpoint can hold: a network among them is in the weights."""
        given = dict(getattr(self.module, "hparams", None) or {})
        return {name: value for name, value in given.items() if _can_be_kept(value)}

    def load_state(self, state: dict[str, Any]) -> None:
        if "epoch" not in state:
            raise UsageError(
                "this checkpoint is of weights alone: nbtrain.load(path, model=module), then fit without it"
            )
        self.current_epoch, self.global_step = state["epoch"], state["global_step"]
        self.first_epoch, self._goes_on_at = state["first_epoch"], state.get("position")
        self._epochs_done = state["epoch"] + (not state["batches"])
        self._batches_before = -(-state["batches"] // self._shares())
        self.batches_seen = state["batches_seen"]
        if has(self.module, "on_load_checkpoint"):
            self.module.on_load_checkpoint(state["module"])
        for one, found in _of_same_class(self.callbacks, state["callbacks"]):
            one.load_state_dict(found)
        for one, found in _of_same_class(self.callbacks, state.get("of_callbacks", ())):
            if has(one, "on_load_checkpoint"):
                one.on_load_checkpoint(self, self.module, found)


def _can_be_kept(value: Any) -> bool:
    if isinstance(value, nn.Module | torch.Tensor):
        return False
    try:
        pickle.dumps(value)
    except Exception:  # whatever a class of the user's raises
        return False
    return True


class _Hyperparameters(nn.Module):
    """In a checkpoint of weights alone, in place of a Trainer's counters."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(0))
        self.__dict__["held"] = {"hparams": held}

    def get_extra_state(self) -> Any:
        return self.__dict__["held"]

    def set_extra_state(self, state: Any) -> None: ...


def _of_same_class(callbacks: list[Any], states: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, Any]]:
    kept = list(states)
    for one in callbacks:
        same = next((found for found in kept if found[0] == type(one).__name__), None)
        if same is not None:
            kept.remove(same)
            yield one, same[1]


class _Counters(nn.Module):
    """A trainer's own state in a checkpoint: what torch calls extra state, in a module with a number to be one."""

    def __init__(self, trainer: LoopParts) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(trainer.global_step))
        self.__dict__["trainer"] = trainer

    def get_extra_state(self) -> Any:
        return self.__dict__["trainer"].counters()

    def set_extra_state(self, state: Any) -> None:
        self.__dict__["trainer"].load_state(state)
