"""Finds a learning rate: a few steps with larger and larger ones, which nobody remembers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nbtrain.errors import UsageError
from nbtrain.trainer.callbacks.base import Callback, attribute
from nbtrain.training.random_states.default_generators import capture, restore

BETA = 0.98
"""of the smoothed loss"""


class LearningRates:
    """What was tried: `lr.suggestion()`, `lr.plot()`, `lr.results`."""

    def __init__(self, rates: list[float], losses: list[float]) -> None:
        self.results = {"lr": rates, "loss": losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the loss falls most steeply; None if too few were tried."""
        losses = torch.tensor(self.results["loss"][skip_begin : -skip_end or None], dtype=torch.float64)
        losses = losses[torch.isfinite(losses)]
        if len(losses) < 2:
            return None
        (slope,) = torch.gradient(losses)
        return self.results["lr"][int(slope.argmin()) + skip_begin]

    def plot(self, suggest: bool = False) -> Any:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UsageError("a plot is drawn by matplotlib: pip install matplotlib") from None
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot(self.results["lr"], self.results["loss"])
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        if suggest and (best := self.suggestion()) is not None:
            axes.axvline(best, color="red")
        return figure

    def __repr__(self) -> str:
        return f"{len(self.results['lr'])} learning rates tried, suggested: {self.suggestion()}"


class LearningRateFinder(Callback):
    """Before the first fit: tries `num_training_steps` rates from `min_lr` to `max_lr` on a copy of the module, and
    sets its `lr` or `learning_rate`, which `configure_optimizers` reads. `optimal_lr` has what was tried."""

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if mode not in ("exponential", "linear"):
            raise UsageError(f"mode={mode!r}: 'exponential' or 'linear'")
        self.min_lr, self.max_lr, self.num_training_steps, self.mode = min_lr, max_lr, num_training_steps, mode
        self.early_stop_threshold, self.update_attr, self.attr_name = early_stop_threshold, update_attr, attr_name
        self.optimal_lr: LearningRates | None = None

    def before_fit(self, trainer: Any, module: Any, data: Any, train_loader: Any, is_given: bool) -> None:
        if not getattr(module, "automatic_optimization", True):
            raise UsageError("LearningRateFinder is there for optimizers that the Trainer steps")
        names = (self.attr_name,) if self.attr_name else ("lr", "learning_rate")
        rate = attribute(names, module, data) if self.update_attr else None
        sweep = Sweep(self)
        with _random_states_kept(train_loader):
            trainer.probe(copy.deepcopy(module), [sweep], train_loader, steps=self.num_training_steps)
        self.optimal_lr = LearningRates(sweep.rates, sweep.losses)
        found = self.optimal_lr.suggestion()
        if found is None:
            trainer.print(f"LearningRateFinder: too few of {len(sweep.rates)} steps gave a loss; the rate stays")
        elif rate is not None:
            before = trainer.rates(module)
            rate.set(found)
            if trainer.rates(module) == before:
                raise UsageError(
                    f"{' or '.join(names)} is {found:.3g} now, and configure_optimizers does not read it, or its "
                    f"schedule sets another: its rates are {', '.join(map(str, before))} as before"
                )
            trainer.print(f"learning rate: {found:.3g}")


@contextmanager
def _random_states_kept(loader: Any) -> Iterator[None]:
    """The fit afterwards draws what it would have drawn without the search."""
    states = capture()
    samplers = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    drawn_by = {id(one): one for held in samplers if (one := getattr(held, "generator", None)) is not None}
    own = [(one, one.get_state()) for one in drawn_by.values()]
    try:
        yield
    finally:
        restore(states)
        for generator, state in own:
            generator.set_state(state)


class Sweep(Callback):
    """Sets the rate of each step, and notes the loss."""

    def __init__(self, how: LearningRateFinder) -> None:
        self.steps, self.exponential = how.num_training_steps, how.mode == "exponential"
        self.low, self.high, self.threshold = how.min_lr, how.max_lr, how.early_stop_threshold
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.mean = 0.0
        self.group: list[float] = []
        """losses of the batches that make the step under way"""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.group:
            return
        part = len(self.rates) / self.steps
        by_factor = self.low * (self.high / self.low) ** part
        self.rates.append(by_factor if self.exponential else self.low + (self.high - self.low) * part)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rates[-1]

    def on_train_batch_end(self, trainer: Any, module: Any, output: Any, *_: Any) -> None:
        loss = output["loss"] if isinstance(output, dict) else output
        self.group.append(float(trainer.mean_of_ranks(loss.detach())))
        if not trainer.has_stepped:
            return
        self.mean = BETA * self.mean + (1 - BETA) * sum(self.group) / len(self.group)
        self.group = []
        self.losses.append(self.mean / (1 - BETA ** (len(self.losses) + 1)))
        best = min(self.losses[1:], default=self.losses[0])
        if self.threshold is not None and len(self.losses) > 2 and not self.losses[-1] <= self.threshold * best:
            trainer.should_stop = True
