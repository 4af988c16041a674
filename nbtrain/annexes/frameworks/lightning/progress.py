"""Shows a Trainer's run where nbtrain shows every run: what the module logs becomes curves of the dashboard, and
Lightning's own bars, which redraw lines of a terminal that a notebook has not, are left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbtrain.compat import lightning
from nbtrain.worker.loop.steps import Stage

APART = 0.05
"""seconds between two points of a curve: asking Lightning for its metrics takes a tenth of a millisecond"""


@contextmanager
def in_the_dashboard(trainer: Any) -> Iterator[None]:
    """While a function of the trainer runs on a rank."""
    bars = [callback for callback in trainer.callbacks if type(callback) in lightning.bars(trainer)]
    curves = _curves(lightning.callback_class(trainer))
    trainer.callbacks = [*(callback for callback in trainer.callbacks if callback not in bars), curves]
    steps = runtime_here().steps
    steps.stage_of = lambda loader: _stage(trainer)
    try:
        yield
    finally:  # the module may have brought callbacks meanwhile
        steps.stage_of = None
        trainer.callbacks = [*bars, *(callback for callback in trainer.callbacks if callback is not curves)]


def _curves(base: Any) -> Any:
    class Curves(base):
        """Draws what the module has logged; a number of an evaluation once, when it has ended."""

        def __init__(self) -> None:
            self.trained: set[str] = set()
            self.evaluated: set[str] = set()
            self.drawn = 0.0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if time.perf_counter() - self.drawn >= APART:
                self._draw(trainer)

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            self._draw(trainer)

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                metrics = trainer.callback_metrics
                self.evaluated |= metrics.keys() - self.trained
                _log({name: metrics[name] for name in self.evaluated if name in metrics})

        def _draw(self, trainer: Any) -> None:
            metrics = {name: value for name, value in trainer.callback_metrics.items() if name not in self.evaluated}
            self.trained |= metrics.keys()
            self.drawn = time.perf_counter()
            _log(metrics)

    return Curves()


def _stage(trainer: Any) -> Stage:
    """What the progress line and the dashboard say of a loader whose iteration begins now."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else None
    if trainer.state.fn != "fit":
        return Stage(trainer.current_epoch, epochs, trainer.state.fn.value)
    if trainer.validating or trainer.sanity_checking:
        return Stage(trainer.current_epoch, epochs, "validation")
    counted = trainer.num_training_batches
    return Stage(trainer.current_epoch, epochs, most=int(counted) if counted < float("inf") else None)


def runtime_here() -> Any:
    from nbtrain.worker.runtime import installed  # on a rank

    return installed()


def _log(metrics: dict[str, Any]) -> None:
    runtime = runtime_here()
    # `log` itself would advise its own options.
    runtime.logged.send(runtime.steps.count, {name: float(value) for name, value in metrics.items()})
