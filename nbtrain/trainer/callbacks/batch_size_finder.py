"""Finds the largest batch that fits, by trying."""

from __future__ import annotations

from typing import Any

from nbtrain.errors import UsageError
from nbtrain.trainer.callbacks.base import Callback, place_of


class BatchSizeFinder(Callback):
    """Before the first fit: a few steps with larger and larger batches, as `%%distributed --find-batch` makes them,
    until one does not fit; then sets `batch_size` of the module or data module, which its `train_dataloader` reads.

    The search doubles from the loader's own size and then bisects, whatever `mode` is.
    """

    def __init__(
        self, mode: str = "power", steps_per_trial: int = 3, batch_arg_name: str = "batch_size", **others: Any
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise UsageError(f"mode={mode!r}: 'power' or 'binsearch'")
        if unknown := others.keys() - {"init_val", "max_trials", "margin", "max_val"}:
            raise UsageError(f"BatchSizeFinder has no argument {sorted(unknown)[0]!r}")
        self.mode, self.steps_per_trial, self.batch_arg_name = mode, steps_per_trial, batch_arg_name
        self.optimal_batch_size: int | None = None

    def before_fit(self, trainer: Any, module: Any, data: Any, train_loader: Any) -> Any:
        """Returns the loader with that size."""
        place = place_of((self.batch_arg_name,), module, data)
        holder = data if hasattr(data, "train_dataloader") else module
        if not hasattr(holder, "train_dataloader"):
            raise UsageError(
                f"BatchSizeFinder sets {self.batch_arg_name}, which def train_dataloader(self) of the module or data "
                "module reads: a loader that is given to fit has its size already"
            )
        self.optimal_batch_size = trainer.largest_batch(module, train_loader, self.steps_per_trial)
        place.set(self.optimal_batch_size)
        trainer.print(f"batch size: {self.optimal_batch_size}")
        return holder.train_dataloader()
