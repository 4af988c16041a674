"""Ends a training early."""

from __future__ import annotations

import math
from typing import Any

from nbtrain.trainer.callbacks.base import Callback, better, known_mode


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
        self.monitor, self.mode = monitor, known_mode(mode)
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
