"""Finds the largest batch that fits, by trying."""

from __future__ import annotations

from typing import Any

from nbtrain.errors import UsageError
from nbtrain.trainer.callbacks.base import Callback, attribute
from nbtrain.trainer.module import has


class BatchSizeFinder(Callback):
    """Before the first fit: a few steps with larger and larger batches, as `%%distributed --find-batch` makes them,
    until one does not fit; then sets `batch_size` of the module or data module, which its `train_dataloader` reads.

    The search doubles from the loader's own size and then bisects, whatever `mode` is; `max_val` is the most that is
    taken.
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        batch_arg_name: str = "batch_size",
        max_val: int | None = None,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise UsageError(f"mode={mode!r}: 'power' or 'binsearch'")
        self.mode, self.steps_per_trial = mode, steps_per_trial
        self.batch_arg_name, self.max_val = batch_arg_name, max_val
        self.optimal_batch_size: int | None = None

    def before_fit(self, trainer: Any, module: Any, data: Any, train_loader: Any, is_given: bool) -> Any:
        """Returns the loader with that size."""
        if is_given:
            raise UsageError(
                f"BatchSizeFinder sets {self.batch_arg_name}, which def train_dataloader(self) of the module or data "
                "module reads: a loader that is given to fit has its size already"
            )
        size = attribute((self.batch_arg_name,), module, data)
        found = trainer.largest_batch(module, train_loader, self.steps_per_trial)
        self.optimal_batch_size = found if self.max_val is None else min(found, self.max_val)
        size.set(self.optimal_batch_size)
        loader = (data if has(data, "train_dataloader") else module).train_dataloader()
        if getattr(loader, "batch_size", self.optimal_batch_size) != self.optimal_batch_size:
            raise UsageError(
                f"{self.batch_arg_name} is {self.optimal_batch_size} now, and train_dataloader does not read it: its "
                f"batches have {loader.batch_size}"
            )
        trainer.print(f"batch size: {self.optimal_batch_size}")
        return loader
