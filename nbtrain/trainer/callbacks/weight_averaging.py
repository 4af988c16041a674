"""Averages the weights of a training's last epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.swa_utils import SWALR, AveragedModel

from nbtrain.errors import UsageError
from nbtrain.trainer.callbacks.base import Callback
from nbtrain.trainer.optimizers import Schedule


class StochasticWeightAveraging(Callback):
    """In the last epochs the learning rate goes to `swa_lrs` and stays there; the weights at the end are the mean of
    those after each of these epochs.

    `swa_epoch_start`: the number of the first epoch that counts, from one; or that number as a part of all epochs.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor] | None = None,
    ) -> None:
        if isinstance(swa_epoch_start, float) and not 0 <= swa_epoch_start <= 1:
            raise UsageError(f"swa_epoch_start={swa_epoch_start}: a part of all epochs is between 0 and 1")
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy, self.avg_fn = annealing_epochs, annealing_strategy, avg_fn
        self.average: AveragedModel | None = None
        self.schedule: Schedule | None = None
        self.first_epoch = 0
        """the first after which weights count, from zero"""
        self.has_ended = False
        """the module has its averaged weights"""

    def set_up(self, trainer: Any, module: torch.nn.Module, resumes: bool) -> None:
        """Before a fit, in the notebook. `resumes`: from a checkpoint, which has weights and average of its own."""
        if len(trainer.optimizers) != 1 or not getattr(module, "automatic_optimization", True):
            raise UsageError("StochasticWeightAveraging is there for one optimizer that the Trainer steps")
        if isinstance(self.swa_epoch_start, float) and not (trainer.max_epochs or 0) > 0:
            raise UsageError(
                f"swa_epoch_start={self.swa_epoch_start} is a part of all epochs, and how many there are is not known: "
                "Trainer(max_epochs=…)"
            )
        start = self.swa_epoch_start
        first = int(trainer.last_epoch * start) if isinstance(start, float) else start
        self.first_epoch = max(first - 1, 0)
        if self.first_epoch >= trainer.last_epoch:
            raise UsageError(f"swa_epoch_start={start}, and the training has {trainer.last_epoch} epochs: none counts")
        if self.schedule not in trainer.schedules:  # another module, or other parameters
            self.average = AveragedModel(module, avg_fn=self.avg_fn)
            self.schedule = Schedule(self._schedule(trainer.optimizers[0]), name="swa")
            trainer.schedules.append(self.schedule)
            self.has_ended = False
        elif not resumes:
            self.check_goes_on()

    def state_dict(self) -> dict[str, Any]:
        return {"has_ended": self.has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.has_ended = state.get("has_ended", False)

    def check_goes_on(self) -> None:
        """A training that was stopped does."""
        if self.has_ended:
            raise UsageError(
                "the module has its averaged weights: another fit would average over both trainings. Fit it with a new "
                "Trainer"
            )

    def _schedule(self, optimizer: Any) -> SWALR:
        before = [group["lr"] for group in optimizer.param_groups]
        rates: Any = self.swa_lrs
        # SWALR itself checks the word
        made = SWALR(optimizer, rates, self.annealing_epochs, self.annealing_strategy)  # type: ignore[arg-type]
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate  # without epochs to anneal it has begun already
        return made
