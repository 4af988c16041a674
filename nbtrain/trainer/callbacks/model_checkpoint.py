"""Checkpoints of a Trainer: which are made, named and kept."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from nbtrain.trainer.callbacks.base import Callback, known_mode

PLACE = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""`{val_loss:.2f}` in the name of a checkpoint"""


class ModelCheckpoint(Callback):
    """Saves a checkpoint when an epoch has ended, or every few steps: the last one, and the best by a metric."""

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
        save_weights_only: bool = False,
        auto_insert_metric_name: bool = True,
    ) -> None:
        """`save_weights_only`: to load, not to go on from. `auto_insert_metric_name`: `{val_loss:.2f}` in `filename`
        becomes `val_loss=0.25`, and not `0.25`."""
        self.dirpath = str(dirpath) if dirpath is not None else ""
        self.filename = filename or "{epoch}-{step}"
        self.monitor, self.mode, self.verbose = monitor, known_mode(mode), verbose
        self.save_last, self.save_top_k = save_last, save_top_k
        self.every_n_epochs, self.every_n_train_steps = every_n_epochs, every_n_train_steps
        self.save_weights_only, self.auto_insert_metric_name = save_weights_only, auto_insert_metric_name
        self.best_model_path = self.last_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.best_k_models: dict[str, float] = {}
        self._spent: list[str] = []
        """folders that a better one has taken the place of; they go when that one is whole"""
        self._is_due = False
        """a checkpoint of `every_n_train_steps`, whose metric a validation or the end of the epoch gives"""

    def on_checkpoint(self, trainer: Any, module: Any) -> None:
        """Called last in an epoch: what the checkpoint counts as done is done."""
        if trainer.in_epoch and self.monitor is None:
            return  # only a validation has ended
        by_epochs = self.every_n_train_steps is None and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not (by_epochs or self._is_due):
            return
        value = trainer.judged(self.monitor, "ModelCheckpoint", True) if self.monitor else None
        if self.monitor is None or value is not None:
            self._is_due = False
            self._save(trainer, value)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """With the metric as it was last. Where there is none yet, or this is the last batch before a validation, the
        checkpoint waits for it."""
        if not (self.every_n_train_steps and trainer.has_stepped):
            return
        if trainer.global_step % self.every_n_train_steps == 0:
            value = trainer.metric_of(self.monitor, "ModelCheckpoint", strict=False) if self.monitor else None
            self._is_due = self.monitor is not None and (value is None or trainer.validates_next)
            if not self._is_due:
                self._save(trainer, value)

    def _save(self, trainer: Any, value: float | None) -> None:
        """`value`: of the metric that it watches."""
        if self.save_top_k == 0 and not self.save_last:
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
        trainer.save_checkpoint(path, self.save_weights_only)  # waits for the one before
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
            found = format(value, form or "")
            return f"{name.replace('/', '_')}={found}" if self.auto_insert_metric_name else found

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
