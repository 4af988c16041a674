"""What a written loop calls: counting, logging, hooks, limits. None of it trains."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import UsageError
from nbtrain.trainer.logged_values import LoggedValues, draw
from nbtrain.trainer.module import COUNTED, has
from nbtrain.training.checkpoints.api import load, save
from nbtrain.training.data.batch_dealing import samples_in
from nbtrain.training.data.whole_batches import WholeBatches

HOOKS = {"validation": "validation", "test": "test", "predict": "predict", "train": "train"}


class LoopParts:
    """The half of a Trainer that its loop speaks to, on every rank."""

    callbacks: list[Any]
    limits: dict[str, Any]
    max_steps: int
    max_time: float | None
    min_epochs: int | None
    min_steps: int | None
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    accumulate_grad_batches: int
    accumulates: bool
    logger: Any

    def __init__(self) -> None:
        self.module: Any = None
        self.optimizers: list[Any] = []
        self.schedules: list[Any] = []
        self.current_epoch = self.global_step = self.first_epoch = 0
        self.batch_idx = self.dataloader_idx = 0
        self.should_stop = False
        self.has_stepped = False
        self.sanity_checking = False
        self.stage = ""
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.loader_of: dict[str, int] = {}
        """metric of an evaluation → number of its loader"""
        self.validates = False
        self.loaders_of_evaluation = 1
        self.resumes_from = ""
        self.keeps_predictions = True
        self.predictions: list[list[Any]] = []
        self._logged: dict[str, LoggedValues] = {}
        self._batch: Any = None
        self._output: Any = None
        self._outputs: list[list[Any]] = []
        self._hooks: dict[str, list[Any]] = {}
        self._batches_before = 0
        """that all ranks together have seen of the epoch that a checkpoint was made in"""
        self._in_epoch = False
        self._epochs_done = 0
        self._began_at = 0.0

    # -- where it is ---------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return int(getattr(builtins, "world_size", 1))

    @property
    def global_rank(self) -> int:
        return int(getattr(builtins, "rank", 0))

    @property
    def local_rank(self) -> int:
        return int(getattr(builtins, "local_rank", 0))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def device(self) -> torch.device:
        found = getattr(builtins, "device", None)
        return found if isinstance(found, torch.device) else torch.device("cpu")

    @property
    def training(self) -> bool:
        return self.stage == "train"

    def leave(self) -> None:
        """However the loop has ended: what only it used does not go home."""
        self._batch = self._output = None
        self._outputs, self._hooks, self._logged = [], {}, {}
        self.stage = ""
        self.__dict__.pop("_before", None)

    # -- training ------------------------------------------------------------------------------

    def begin_training(self) -> None:
        self.should_stop = False
        self._began_at = time.monotonic()
        self.stage = "train"
        self.call("on_fit_start")
        self.call("on_train_start")

    def begin_epoch(self, epoch: int) -> None:
        self.current_epoch = epoch
        self.batch_idx = -1
        self._in_epoch = True
        self._logged["train"] = LoggedValues("train")
        self._outputs = [[]]
        self._tell_module()
        self.call("on_train_epoch_start")

    def batches(self, loader: Any, dataloader_idx: int = 0) -> Iterator[tuple[int, Any]]:
        """The loader's batches and their numbers, up to the limit."""
        stage, before = self.stage, self._batches_before if self.training else 0
        limit = self.limit(loader)
        self._batches_before, self.dataloader_idx = 0, dataloader_idx
        if not self.training:
            self._outputs.append([])
        found = False
        for batch_idx, batch in zip(range(before, limit), loader, strict=False):
            found = True
            self.batch_idx, self._batch = batch_idx, batch
            self._call_batch("start")
            yield batch_idx, batch
            if self.training and (self._no_more_steps() or self.should_stop):
                return
        if not found and limit and stage == "train" and not before:
            raise UsageError("the training loader is empty: it gave no batch")

    def limit(self, loader: Any) -> int:
        """How many batches count."""
        if self.sanity_checking:
            return self.num_sanity_val_steps if self.num_sanity_val_steps >= 0 else 1 << 62
        limit = self.limits.get(self.stage)
        if isinstance(limit, float) and limit != 1.0:
            return int(len(loader) * limit)
        return int(limit) if limit is not None and not isinstance(limit, float) else 1 << 62

    def loss_of(self, output: Any) -> torch.Tensor:
        """The loss of what `training_step` has returned."""
        self.note_output(output)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            found = "nothing" if loss is None else type(loss).__name__
            raise UsageError(
                f"training_step of {type(self.module).__name__} returned {found}: it returns the loss, or a dict with "
                "'loss'. A batch that is to be left out: return 0 * loss"
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss that training_step returned has no gradient: it was detached, or computed without the "
                "module's parameters"
            )
        if self._logged["train"].is_time_to_draw() and bool(torch.isnan(loss).any()):
            raise UsageError(
                f"the loss is NaN in epoch {self.current_epoch}, batch {self.batch_idx}. Trainer(detect_anomaly=True) "
                "says where it comes from; a smaller learning rate or gradient_clip_val=1.0 often helps"
            )
        self.has_stepped = not self.accumulates
        return loss

    def note_output(self, output: Any) -> None:
        self._output = output
        self.has_stepped = True
        name = f"{HOOKS[self.stage] if not self.training else 'training'}_epoch_end"
        if output is not None and self._outputs and has(self.module, name):
            self._outputs[-1].append(tree_map_only(torch.Tensor, torch.Tensor.detach, output))

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
        self.has_stepped = done % self.accumulate_grad_batches == 0 or done == min(self.limit(loader), len(loader))
        return self.has_stepped

    def end_batch(self) -> None:
        if self.training and self.has_stepped:
            self.global_step += 1
            self._tell_module()
        self._call_batch("end")
        if self.training and self._logged["train"].is_time_to_draw():
            self._draw(self.logged_metrics)

    def validation_is_due(self, loader: Any) -> bool:
        every, seen = self.val_check_interval, self.batch_idx + 1
        if self.check_val_every_n_epoch is None:
            return self.global_step > 0 and self.global_step % int(every) == 0
        if (self.current_epoch + 1) % self.check_val_every_n_epoch:
            return False
        length = min(self.limit(loader), len(loader)) if isinstance(every, float) else 0
        return seen % (max(1, int(length * every)) if isinstance(every, float) else every) == 0

    def end_epoch(self) -> None:
        """Metrics of the epoch, and what is called when it has ended."""
        self._take(self._logged["train"].of_epoch(self._reduced))
        if has(self.module, "training_epoch_end"):
            self.module.training_epoch_end(self._outputs[0])
        self.call("on_train_epoch_end")
        self._take(self._logged["train"].of_epoch(self._reduced))
        self._draw(self.callback_metrics)
        self.call("on_epoch_metrics")
        short = self.current_epoch + 1 < (self.min_epochs or 0) or self.global_step < (self.min_steps or 0)
        self.should_stop = (self.should_stop and not short) or self._no_more_steps()
        self._outputs = [[]]

    def checkpoint(self) -> None:
        """Last in an epoch: what a checkpoint counts as done is done."""
        self._in_epoch, self._epochs_done = False, self.current_epoch + 1
        self.call("on_checkpoint")

    def end_training(self) -> None:
        self.current_epoch = self._epochs_done
        self._tell_module()
        self.call("on_train_end")
        self.call("on_fit_end")
        for one in self.callbacks:
            if hasattr(one, "remove_spent"):
                one.remove_spent(self)

    def _no_more_steps(self) -> bool:
        if 0 <= self.max_steps <= self.global_step:
            return True
        if self.max_time is None:
            return False
        late = float(time.monotonic() - self._began_at > self.max_time)
        return self._reduced(torch.tensor(late), "max").item() > 0

    # -- evaluation ----------------------------------------------------------------------------

    def begin_evaluation(self, stage: str) -> None:
        self._before = self.stage, self.batch_idx, self._batch, self._outputs
        self.stage, self._outputs = stage, []
        self._logged[stage] = LoggedValues(stage)
        if stage == "predict":
            self.predictions = []
        self.call(f"on_{stage}_start")
        self.call(f"on_{stage}_epoch_start")

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """A few batches of the validation, before hours of training end in its first error."""
        before = dict(self.callback_metrics), dict(self.logged_metrics)
        self.sanity_checking = True
        try:
            yield
        finally:
            self.sanity_checking = False
            self.callback_metrics, self.logged_metrics = before

    def end_evaluation(self) -> None:
        stage, logged = self.stage, self._logged[self.stage]
        self._take(logged.of_epoch(None))
        if has(self.module, f"{stage}_epoch_end"):
            getattr(self.module, f"{stage}_epoch_end")(self._outputs[0] if len(self._outputs) == 1 else self._outputs)
        self.call(f"on_{stage}_epoch_end")
        found = logged.of_epoch(None)
        self._take(found)
        self.loader_of = dict(logged.by_loader)
        if not self.sanity_checking:
            self._draw({name: value for name, value in self.callback_metrics.items() if name in logged.by_loader})
        self.call(f"on_{stage}_end")
        self.stage, self.batch_idx, self._batch, self._outputs = self._before
        del self._before

    def shared_batches(self, loader: Any, dataloader_idx: int = 0) -> Iterator[tuple[int, Any]]:
        """Of all batches those that this rank predicts, whole ones, so that each is what one process gives."""
        self.dataloader_idx = dataloader_idx
        self.predictions.append([])
        dealt = WholeBatches(loader, self.limit(loader))
        for batch_idx, batch in dealt:
            self.batch_idx, self._batch = batch_idx, batch
            self._call_batch("start")
            yield batch_idx, batch
        if self.keeps_predictions:
            self.predictions[-1] = dealt.whole(self.predictions[-1])

    def keep(self, prediction: Any) -> None:
        self._output = prediction
        self._call_batch("end")
        if self.keeps_predictions:
            self.predictions[-1].append(tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), prediction))

    def end_predictions(self) -> None:
        self.call("on_predict_epoch_end")
        self.call("on_predict_end")
        self.stage, self.batch_idx, self._batch, self._outputs = self._before
        del self._before

    # -- what a module calls as self.… ------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        """Each rank's number at once, of its own batch; for an epoch the mean over all samples of all ranks, with and
        without `sync_dist`."""
        logged = self._logged.get(self.stage)
        if logged is None:
            raise UsageError(f"self.log({name!r}, …) outside of an epoch: there is nothing that it is a number of")
        in_batch = self._batch is not None
        on_step = (self.training and in_batch) if on_step is None else on_step
        on_epoch = not on_step if on_epoch is None else on_epoch
        if not self.training and self.loaders_of_evaluation > 1 and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        size = batch_size or (samples_in(self._batch) if in_batch else 1) or 1
        found = logged.add(
            name, value, batch_size=size, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduce_fx, prog_bar=prog_bar,
            loader=self.dataloader_idx,
        )  # fmt: skip
        if sync_dist and found:
            found = {key: self._reduced(one, "mean") for key, one in found.items()}
        self._take(found)

    def log_dict(self, values: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(name, value, *args, **kwargs)

    def module_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    def module_schedulers(self) -> Any:
        found = [one.scheduler for one in self.schedules]
        return found[0] if len(found) == 1 else found or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_val:
            clip = nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_
            clip(held, gradient_clip_val)

    def toggle_optimizer(self, optimizer: Any, optimizer_idx: int = 0) -> None:
        """Nothing: gradients of other parameters are dropped by their optimizer's `zero_grad` before they count."""

    def untoggle_optimizer(self, optimizer: Any = None, optimizer_idx: int = 0) -> None: ...

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Of a training step, the values of all ranks, stacked. An evaluation has all samples on every rank."""
        gather = getattr(builtins, "gather", None)
        if gather is None or not self.training or self.world_size == 1:
            return data
        return tree_map_only(torch.Tensor, lambda t: torch.stack(gather(t, sync_grads=sync_grads)), data)

    def print(self, *values: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*values, **kwargs)

    # -- metrics ---------------------------------------------------------------------------------

    def metric_of(self, name: str, who: str, strict: bool = True) -> float | None:
        if name in self.callback_metrics:
            return float(self.callback_metrics[name])
        if strict:
            there = ", ".join(map(repr, self.callback_metrics)) or "none"
            raise UsageError(f"{who} watches {name!r}, which nothing has logged. Logged so far: {there}")
        return None

    def _take(self, found: dict[str, torch.Tensor]) -> None:
        self.callback_metrics |= found
        self.logged_metrics |= found
        for name, value in found.items():
            if name.endswith(("_step", "_epoch")):
                self.callback_metrics[name.rpartition("_")[0]] = value

    def _draw(self, values: dict[str, torch.Tensor]) -> None:
        draw(values)
        if values and self.is_global_zero and hasattr(self.logger, "log_metrics"):
            self.logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.global_step)

    def _reduced(self, value: torch.Tensor, how: str) -> torch.Tensor:
        log = getattr(builtins, "log", None)
        return log.__self__.reduce_values(value, how) if log is not None and self.world_size > 1 else value

    # -- hooks -----------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> None:
        """Callbacks first, then the module."""
        if name not in self._hooks:
            self._hooks[name] = [
                (one, one is not self.module) for one in (*self.callbacks, self.module) if has(one, name)
            ]
        for one, is_callback in self._hooks[name]:
            getattr(one, name)(*((self, self.module) if is_callback else ()), *args)

    def _call_batch(self, when: str) -> None:
        args: tuple[Any, ...] = (self._batch, self.batch_idx)
        if when == "end":
            args = (self._output, *args)
        if not self.training and self.dataloader_idx:
            args = (*args, self.dataloader_idx)
        self.call(f"on_{self.stage}_batch_{when}", *args)

    def _tell_module(self) -> None:
        held = self.module.__dict__
        for name in COUNTED:
            if name in held:
                held[name] = getattr(self, name)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, path: Any) -> None:
        """A checkpoint from which any strategy goes on, with the trainer's own counters and callbacks."""
        save(path, **self._held())

    def restore(self, path: str) -> None:
        load(path, **self._held())

    def restore_weights(self, path: str) -> None:
        load(path, model=self.module)

    def _held(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.module}
        for kind, held in (("optimizer", self.optimizers), ("scheduler", [one.scheduler for one in self.schedules])):
            found |= {f"{kind}-{number}" if number else kind: one for number, one in enumerate(held)}
        return found | {"trainer": _Counters(self)}

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.current_epoch, "global_step": self.global_step, "first_epoch": self.first_epoch,
            "batches": (self.batch_idx + 1) * self.world_size if self._in_epoch else 0,
            "callbacks": [(type(one).__name__, one.state_dict()) for one in self.callbacks if has(one, "state_dict")],
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        self.current_epoch, self.global_step = state["epoch"], state["global_step"]
        self.first_epoch = state["first_epoch"]
        self._epochs_done = state["epoch"] + (not state["batches"])
        self._batches_before = -(-state["batches"] // self.world_size)
        kept = list(state["callbacks"])
        for one in self.callbacks:
            same = next((found for found in kept if found[0] == type(one).__name__), None)
            if same is not None:
                kept.remove(same)
                one.load_state_dict(same[1])


class _Counters(nn.Module):
    """A trainer's own state in a checkpoint: what torch calls extra state, in a module with a number to be one."""

    def __init__(self, trainer: LoopParts) -> None:
        super().__init__()
        self.register_buffer("global_step", torch.tensor(trainer.global_step))
        self.__dict__["trainer"] = trainer

    def get_extra_state(self) -> Any:
        return self.__dict__["trainer"].state()

    def set_extra_state(self, state: Any) -> None:
        self.__dict__["trainer"].load_state(state)
