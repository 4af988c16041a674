"""What modules and callbacks ask a Trainer, by the names that they know: how many batches and steps there will be, of
which loader, in which stage. The notebook is told what the ranks are, so that `configure_optimizers` may ask."""

from __future__ import annotations

import builtins
import math
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbtrain.errors import UsageError
from nbtrain.trainer.combined_loader import CombinedLoader
from nbtrain.training.data.batch_dealing import dealt_out
from nbtrain.training.data.stream_dealing import dealt_as_stream
from nbtrain.worker.shell.run_script import in_a_script

NO_LIMIT = 1_000_000_000
"""of epochs"""
LIMITS = {
    "train": "limit_train_batches", "validation": "limit_val_batches", "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}  # fmt: skip
"""stage → the argument that says how many batches count"""


def runs_in_a_script() -> bool:
    if in_a_script():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is None or ipython.get_ipython() is None


class Facts:
    """All of it is read only, and there while a Trainer runs."""

    limits: dict[str, Any]
    loggers: list[Any]
    module: Any
    callbacks: list[Any]
    optimizers: list[Any]
    schedules: list[Any]
    default_root_dir: str
    max_steps: int
    max_epochs: int | None
    max_time: float | None
    current_epoch: int
    accumulate_grad_batches: int
    num_sanity_val_steps: int
    overfit_batches: int | float
    num_nodes = 1

    def __init__(self) -> None:
        self.stage = ""
        self.datamodule: Any = None
        self._loaders: dict[str, list[Any]] = {}
        self._ranks: tuple[int, int] | None = None
        """(how many there will be, how many batches a step of theirs takes), once it was asked for"""

    @property
    def last_epoch(self) -> int:
        """The number of epochs at whose end the training is over."""
        if self.max_epochs is None:
            return NO_LIMIT if self.max_steps >= 0 or self.max_time else 1000
        return NO_LIMIT if self.max_epochs < 0 else self.max_epochs

    # -- ranks -----------------------------------------------------------------------------------

    def planned_ranks(self) -> tuple[int, int]:
        """In the notebook: how many ranks there will be, and how many batches a step of theirs takes."""
        return 1, 1

    def _ranks_asked(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        found = self.planned_ranks()
        if self._loaders:  # a run is prepared: until it is over they stay as many
            self._ranks = found
        return found

    @property
    def world_size(self) -> int:
        found = getattr(builtins, "world_size", None)
        return int(found) if found is not None else self._ranks_asked()[0]

    @property
    def global_rank(self) -> int:
        return int(getattr(builtins, "rank", os.environ.get("RANK", "0") if runs_in_a_script() else "0"))

    @property
    def local_rank(self) -> int:
        return int(getattr(builtins, "local_rank", os.environ.get("LOCAL_RANK", "0") if runs_in_a_script() else "0"))

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

    @property
    def num_devices(self) -> int:
        return self.world_size

    # -- loaders ---------------------------------------------------------------------------------

    def uses(self, stage: str, loaders: Sequence[Any]) -> None:
        self._loaders[stage] = list(loaders)

    def _tell_samplers(self) -> None:
        """Which epoch it is: that of torch's DistributedSampler draws another order in each."""
        for loader in (*self._loaders.get("train", []), *self._loaders.get("validation", [])):
            for one in loader.each() if isinstance(loader, CombinedLoader) else [loader]:
                batches = getattr(one, "batch_sampler", None)
                samplers = getattr(one, "sampler", None), batches, getattr(batches, "sampler", None)
                for sampler in {id(held): held for held in samplers}.values():
                    tell = getattr(sampler, "set_epoch", None)
                    if callable(tell):
                        tell(self.current_epoch)

    def let_go(self) -> None:
        """Of what a run had: it is the caller's, and would be sent with each later one."""
        self._loaders, self.datamodule, self._ranks = {}, None, None

    def _one_or_all(self, stage: str) -> Any:
        found = self._loaders.get(stage, [])
        return (found[0] if len(found) == 1 else found) if found else None

    @property
    def train_dataloader(self) -> Any:
        return self._one_or_all("train")

    @property
    def val_dataloaders(self) -> Any:
        return self._one_or_all("validation")

    @property
    def test_dataloaders(self) -> Any:
        return self._one_or_all("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._one_or_all("predict")

    def _counts(self, stage: str) -> list[int | float]:
        return [self._part(stage, _batches(one, 1)) for one in self._loaders.get(stage, [])]

    def _part(self, stage: str, length: int | float) -> int | float:
        """How many of a loader's batches count."""
        limit = self.limits[stage]
        if not isinstance(limit, float):
            return length if limit is None else min(length, limit)
        if limit == 1.0 or length in (0, math.inf):
            return length
        if limit and int(length * limit) == 0:
            is_overfit = self.overfit_batches and stage in ("train", "validation")
            name = "overfit_batches" if is_overfit else LIMITS[stage]
            on_each = " of each rank" if stage == "train" and self.world_size > 1 else ""
            # 1 / length in so many digits, rounded up: 49 * (1 / 49) is less than one
            least = math.ceil(100 * 10 ** len(str(length)) / length) / (100 * 10 ** len(str(length)))
            raise UsageError(
                f"{name}={limit} of the {length} batches{on_each} is less than one: write {name}={least} or more, or "
                f"{name}=1 for one batch"
            )
        return int(length * limit)

    @property
    def num_training_batches(self) -> int | float:
        """Of an epoch, on each rank. Infinite where the loader does not say."""
        on_a_rank = hasattr(builtins, "world_size")
        shares = 1 if on_a_rank else self._ranks_asked()[1]  # on a rank the loader has its own share
        found = [self._part("train", _batches(one, shares)) for one in self._loaders.get("train", [])]
        return found[0] if found else math.inf

    @property
    def num_val_batches(self) -> list[int | float]:
        return self._counts("validation")

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._counts("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self._counts("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        most = self.num_sanity_val_steps if self.num_sanity_val_steps >= 0 else math.inf
        return [min(most, count) for count in self.num_val_batches]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """How many steps the optimizer will make: what a schedule with a length is made with."""
        if "train" not in self._loaders:
            raise UsageError("trainer.estimated_stepping_batches is known while fit runs, in configure_optimizers too")
        batches, epochs = self.num_training_batches, self.last_epoch
        if math.inf in (batches, float(epochs)) or epochs == NO_LIMIT:
            found: int | float = math.inf
        else:
            schedulers = self._callbacks_named("GradientAccumulationScheduler")
            changes: dict[int, int] = schedulers[0].scheduling if schedulers else {}
            found, group = 0, self.accumulate_grad_batches
            for begin, end in pairwise([0, *(at for at in changes if 0 < at < epochs), epochs]):
                group = changes.get(begin, group)
                found += (end - begin) * math.ceil(batches / group)
        return min(found, self.max_steps) if self.max_steps >= 0 else found

    @property
    def is_last_batch(self) -> bool:
        return bool(getattr(self, "batch_idx", -1) + 1 == self.num_training_batches)

    # -- stages ----------------------------------------------------------------------------------

    @property
    def validating(self) -> bool:
        return self.stage == "validation"

    @property
    def testing(self) -> bool:
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        return self.stage in ("validation", "test")

    # -- what it was made with --------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        return self.module

    @property
    def model(self) -> Any:
        return self.module

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        found = getattr(self.logger, "log_dir", None) or getattr(self.logger, "save_dir", None)
        return str(found or self.default_root_dir)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return self.schedules

    def _callbacks_named(self, name: str) -> list[Any]:
        return [one for one in self.callbacks if any(cls.__name__ == name for cls in type(one).__mro__)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return self._callbacks_named("ModelCheckpoint")

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return self._callbacks_named("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def limit_train_batches(self) -> Any:
        return self._limit("train")

    @property
    def limit_val_batches(self) -> Any:
        return self._limit("validation")

    @property
    def limit_test_batches(self) -> Any:
        return self._limit("test")

    @property
    def limit_predict_batches(self) -> Any:
        return self._limit("predict")

    def _limit(self, stage: str) -> Any:
        found = self.limits[stage]
        return 1.0 if found is None else found


def _batches(loader: Any, shares: int) -> int | float:
    """How many batches it has. `shares`: in which ranks will see the loader's."""
    if isinstance(loader, CombinedLoader):
        each = [_batches(one, shares) for one in loader.each()]
        length = min(each) if loader.mode == "min_size" else max(each)
    else:
        try:
            length = len(loader)
        except TypeError:
            length = math.inf
    if length == math.inf:
        return length
    if shares > 1 and isinstance(loader, DataLoader) and (dealt_out(loader) or dealt_as_stream(loader)):
        length = length // shares if loader.drop_last else -(-length // shares)
    return length
