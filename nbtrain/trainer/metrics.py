"""What is logged, by whom and as a number of what: a batch, an epoch, an evaluation."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from nbtrain.errors import UsageError
from nbtrain.trainer.facts import Facts
from nbtrain.trainer.logged_values import LoggedValues, Sums, draw
from nbtrain.training.batches import samples_in


def runtime_here() -> Any:
    """nbtrain's while a loop runs; None outside of it."""
    log = getattr(builtins, "log", None)
    return log.__self__ if log is not None else None


class Metrics(Facts):
    """The part of a Trainer that `self.log` speaks to, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.global_step = self.dataloader_idx = 0
        self.validates = False
        self.loaders_of_evaluation = 1
        self._batch: Any = None
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self.loader_of: dict[str, int] = {}
        """metric of an evaluation → number of its loader"""
        self._logged: dict[str, LoggedValues] = {}
        self._new: dict[str, torch.Tensor] = {}
        """metrics that are not drawn yet"""
        self._for_loggers: dict[str, torch.Tensor] = {}
        """metrics that loggers have not been given yet"""
        self._fresh: set[str] = set()
        """metrics of a whole epoch, or evaluation, that callbacks have not judged yet"""
        self._validated = False
        """since callbacks have judged"""

    # -- logging -------------------------------------------------------------------------------

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
        rank_zero_only: bool = False,
        enable_graph: bool = False,
        sync_dist_group: Any = None,
        metric_attribute: str | None = None,
    ) -> None:
        """Each rank's number at once, of its own batch; for an epoch the mean over all samples of all ranks, with and
        without `sync_dist`. `enable_graph`, `sync_dist_group` and `metric_attribute` make no difference here."""
        logged = self._logged.get(self.stage)
        if logged is None:
            raise UsageError(f"self.log({name!r}, …) outside of an epoch: there is nothing that it is a number of")
        in_batch = self._batch is not None
        if on_epoch is None:  # an evaluation's number is that of all its samples
            on_epoch = not self.training or not (in_batch if on_step is None else on_step)
        on_step = (self.training and in_batch) if on_step is None else on_step
        if not self.training and self.loaders_of_evaluation > 1 and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        size = batch_size or (samples_in(self._batch) if in_batch else 1) or 1
        if rank_zero_only and on_epoch and self.training and self.world_size > 1:
            raise UsageError(
                f"self.log({name!r}, rank_zero_only=True): a mean over an epoch is of all ranks. Leave it out, or "
                "write on_step=True, on_epoch=False"
            )
        found = logged.add(
            name, value, batch_size=size, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduce_fx,
            loader=self.dataloader_idx,
        )  # fmt: skip
        if logger is False:
            logged.not_for_loggers |= {name, f"{name}_epoch", f"{name}_step"}
        if sync_dist and found:
            found = {key: self._reduced(one, "mean") for key, one in found.items()}
        self._take(found)

    def log_dict(self, values: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(name, value, *args, **kwargs)

    # -- reading -------------------------------------------------------------------------------

    def metric_of(self, name: str, who: str, strict: bool = True) -> float | None:
        """The same on every rank: a number of a batch is the mean of the ranks' own."""
        if name in self.callback_metrics:
            return float(self._reduced(self.callback_metrics[name], "mean"))
        if strict:
            there = ", ".join(map(repr, self.callback_metrics)) or "none"
            raise UsageError(f"{who} watches {name!r}, which nothing has logged. Logged so far: {there}")
        return None

    def judged(self, name: str, who: str, strict: bool = True) -> float | None:
        """What a callback judges at the end of an epoch or a validation; None: it is no newer than the last time."""
        is_old = name in self.callback_metrics and name not in self._fresh and name in self.loader_of
        not_yet = name not in self.callback_metrics and self.validates and not self._validated
        return None if is_old or not_yet else self.metric_of(name, who, strict)

    def mean_of_ranks(self, value: torch.Tensor) -> torch.Tensor:
        return self._reduced(value, "mean")

    def _take(self, found: dict[str, torch.Tensor], whole: bool = False) -> None:
        """`whole`: of an epoch or an evaluation."""
        logged = self._logged.get(self.stage)
        self._new |= found
        if self.loggers:
            hidden = logged.not_for_loggers if logged is not None else set()
            self._for_loggers |= {name: value for name, value in found.items() if name not in hidden}
        if not (whole or self.training):  # a batch of an evaluation is drawn, and no metric
            return
        self.callback_metrics |= found
        self.logged_metrics |= found
        both = logged.plain if logged is not None else {}
        for name, value in found.items():
            if name in both:  # `loss` is the latest of `loss_step` and `loss_epoch`
                self.callback_metrics[both[name]] = value
            if whole:
                self._fresh |= {name, both.get(name, name)}

    def _draw(self) -> None:
        """What is new since the last time."""
        values, self._new = self._new, {}
        draw(values)

    def to_loggers(self) -> None:
        """What they have not been given yet, on rank 0."""
        values, self._for_loggers = self._for_loggers, {}
        if values and self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.global_step)

    def call_loggers(self, name: str, *args: Any) -> None:
        """What only some have, on rank 0."""
        for logger in self.loggers if self.is_global_zero else ():
            if hasattr(logger, name):
                getattr(logger, name)(*args)

    def _reduced(self, value: torch.Tensor, how: str) -> torch.Tensor:
        runtime = runtime_here()
        found: torch.Tensor = (
            runtime.reduce_values(value, how) if runtime is not None and self.world_size > 1 else value
        )
        return found

    def _summed(self, mine: Sums) -> Sums:
        """Those of all ranks, which may have logged other names, in another order."""
        if runtime_here() is None or self.world_size == 1:
            return mine
        # One message for all names: of ranks that see the same batches one speaks.
        parts = vars(builtins)["gather"](
            {name: (how, float(value), weight) for name, (how, value, weight) in mine.items()}
        )
        found: Sums = {}
        for name in sorted(set().union(*parts)):
            how, values, weights = zip(*(part[name] for part in parts if name in part), strict=True)
            every = torch.tensor(values, dtype=torch.float64)
            join = {"min": torch.amin, "max": torch.amax}.get(how[0], torch.sum)
            found[name] = how[0], join(every), sum(weights)
        return found
