"""Callbacks by the names that people know. Any object with `on_…` methods is one."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from nbtrain.errors import UsageError

MODES = ("min", "max")
PLACE = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""`{val_loss:.2f}` in the name of a checkpoint"""


def better(mode: str, new: float, old: float, by: float = 0.0) -> bool:
    return new < old - by if mode == "min" else new > old + by


def _mode(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}: 'min' or 'max'")
    return mode


class Callback:
    """Called as `on_train_epoch_end(trainer, module)` and so on, on every rank. What it keeps in `self` comes home."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EarlyStopping(Callback):
    """Ends the training when a metric has stopped improving."""

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        self.monitor, self.mode = monitor, _mode(mode)
        self.min_delta, self.patience = abs(min_delta), patience
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.wait_count = self.stopped_epoch = 0
        self.best_score = math.inf if mode == "min" else -math.inf

    def on_epoch_metrics(self, trainer: Any, module: Any) -> None:
        """When an epoch's metrics are there, the validation's among them."""
        value = trainer.judged(self.monitor, "EarlyStopping", self.strict)
        if value is None:
            return
        why = self._why(value)
        if why:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            if self.verbose:
                trainer.print(f"early stopping after epoch {trainer.current_epoch}: {why}")

    def _why(self, value: float) -> str:
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self.stopping_threshold is not None and better(self.mode, value, self.stopping_threshold):
            return f"{self.monitor} = {value:.4g} has reached {self.stopping_threshold:.4g}"
        if self.divergence_threshold is not None and better(self.mode, self.divergence_threshold, value):
            return f"{self.monitor} = {value:.4g} is beyond {self.divergence_threshold:.4g}"
        if better(self.mode, value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
            return ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return ""
        return f"{self.monitor} has not improved on {self.best_score:.4g} for {self.wait_count} epochs"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("wait_count", "stopped_epoch", "best_score")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class ModelCheckpoint(Callback):
    """Saves a checkpoint when an epoch has ended: the last one, and the best by a metric."""

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        mode: str = "min",
        every_n_epochs: int = 1,
        every_n_train_steps: int | None = None,
    ) -> None:
        self.dirpath = str(dirpath) if dirpath is not None else ""
        self.filename = filename or "{epoch}-{step}"
        self.monitor, self.mode, self.verbose = monitor, _mode(mode), verbose
        self.save_last, self.save_top_k = save_last, save_top_k
        self.every_n_epochs, self.every_n_train_steps = every_n_epochs, every_n_train_steps
        self.best_model_path = self.last_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.best_k_models: dict[str, float] = {}
        self._spent: list[str] = []
        """folders that a better one has taken the place of; they go when that one is whole"""

    def on_checkpoint(self, trainer: Any, module: Any) -> None:
        """Called last in an epoch: what the checkpoint counts as done is done."""
        if trainer.in_epoch and self.monitor is None:
            return  # only a validation has ended
        if self.every_n_train_steps is None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.every_n_train_steps and trainer.has_stepped and trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        if self.save_top_k == 0 and not self.save_last:
            return
        value = trainer.judged(self.monitor, "ModelCheckpoint", True) if self.monitor else None
        if self.monitor and value is None:
            return
        worst = math.inf if self.mode == "min" else -math.inf
        rank = trainer.global_step if value is None else worst if math.isnan(value) else value
        best_first = self.monitor is not None and self.mode == "min"  # without a metric the newest counts
        path = self._free(trainer)
        kept = self.best_k_models | {path: rank}
        order = sorted(kept, key=kept.__getitem__, reverse=not best_first)
        order = order if self.save_top_k < 0 else order[: self.save_top_k]
        if path not in order and not self.save_last:
            return
        before, self.last_model_path = self.last_model_path, path
        if path in order:
            self.best_k_models = {name: kept[name] for name in order}
            self.best_model_path = order[0]
            self.best_model_score = torch.tensor(kept[order[0]]) if value is not None else None
        trainer.save_checkpoint(path)  # waits for the one before
        self.remove_spent(trainer)
        needed = {*self.best_k_models, path, trainer.resumes_from}
        mine = [name for name in (*kept, before) if name and Path(name).parent == Path(self.dirpath)]
        self._spent = [name for name in dict.fromkeys(mine) if name not in needed]
        if self.verbose:
            trainer.print(f"saved {path}")

    def _free(self, trainer: Any) -> str:
        """A folder that none of those kept has: a worse one must not take the place of the best."""
        name, number = self._name(trainer), 1
        path = str(Path(self.dirpath, name))
        while path in self.best_k_models:
            path, number = str(Path(self.dirpath, f"{name}-v{number}")), number + 1
        return path

    def remove_spent(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            for name in self._spent:
                shutil.rmtree(name, ignore_errors=True)
        self._spent = []

    def _name(self, trainer: Any) -> str:
        """`epoch=3-step=400`; `{val_loss:.2f}` in `filename` is that metric."""
        counted = {"epoch": trainer.current_epoch, "step": trainer.global_step}

        def written(place: re.Match[str]) -> str:
            name, form = place.groups()
            value = counted[name] if name in counted else trainer.metric_of(name, "the name of a checkpoint")
            return f"{name.replace('/', '_')}={format(value, form or '')}"

        return PLACE.sub(written, self.filename)

    def state_dict(self) -> dict[str, Any]:
        score = None if self.best_model_score is None else float(self.best_model_score)
        return {
            "best_model_path": self.best_model_path, "last_model_path": self.last_model_path,
            "best_k_models": self.best_k_models, "best_model_score": score,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        score = state["best_model_score"]
        self.__dict__.update(state | {"best_model_score": None if score is None else torch.tensor(score)})


class LearningRateMonitor(Callback):
    """Draws the learning rate of each optimizer."""

    def __init__(self, logging_interval: str | None = None) -> None:
        self.logging_interval = logging_interval

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.logging_interval != "epoch":
            self._log(trainer)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if self.logging_interval != "step":
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        for number, optimizer in enumerate(trainer.optimizers):
            name = f"lr-{type(optimizer).__name__}" + (f"-{number}" if number else "")
            for place, group in enumerate(optimizer.param_groups):
                key = name if len(optimizer.param_groups) == 1 else f"{name}/pg{place + 1}"
                trainer.log(key, float(group["lr"]), on_step=True, on_epoch=False)


class GradientAccumulationScheduler(Callback):
    """`{0: 8, 4: 4}`: from epoch 0 a step every 8 batches, from epoch 4 every 4."""

    def __init__(self, scheduling: dict[int, int]) -> None:
        self.scheduling = dict(sorted(scheduling.items()))

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        due = [count for epoch, count in self.scheduling.items() if epoch <= trainer.current_epoch]
        if due:
            trainer.accumulate_grad_batches = due[-1]
