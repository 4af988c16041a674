"""What follows a schedule, and what watches one."""

from __future__ import annotations

from typing import Any

from nbtrain.trainer.callbacks.base import Callback


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
