"""Private names of Lightning 2.4 to 2.6, of the package `lightning` or of the older `pytorch_lightning`.

Nothing here imports it: each function is given an object of the one that the user has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from nbtrain.compat.internals import Internals

its = Internals("lightning")

LOOPS = ("_combined_loader", "_data_fetcher")
its.members("lightning.pytorch.trainer.trainer.Trainer", "_teardown")
its.members("lightning.pytorch.trainer.call", "_call_teardown_hook")
its.members("lightning.pytorch.utilities.exceptions", "_TunerExitException")
its.fields("lightning.pytorch.loops.fit_loop._FitLoop", *LOOPS)
its.fields("lightning.pytorch.loops.evaluation_loop._EvaluationLoop", *LOOPS)
its.fields("lightning.pytorch.loops.prediction_loop._PredictionLoop", *LOOPS)
its.fields("lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper", "_batch_sampler")
its.fields("lightning.pytorch.trainer.trainer.Trainer", "_accelerator_connector")
its.fields("lightning.pytorch.strategies.ParallelStrategy", "_layer_sync")
its.members("lightning.pytorch.strategies.ParallelStrategy", "setup", "_setup_model", "_configure_launcher")


def has_own(module: nn.Module, name: str) -> bool:
    """Whether it has this method, and not the one of Lightning's base that does nothing of its own."""
    method = getattr(type(module), name, None)
    return callable(method) and getattr(method, "__module__", "") not in MODULES


MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def called_in_steps(module: nn.Module) -> list[nn.Module]:
    """The models that a loop calls: of a LightningModule, which holds the loop's steps, those of its parts that they
    name, or the module itself where they name none. Any other module is called itself."""
    if not any(cls.__module__ in MODULES for cls in type(module).__mro__):
        return [module]
    names = _names_in_steps(type(module))
    parts = [part for name, part in module.named_children() if name in names]
    return [part for part in parts if next(part.parameters(), None) is not None] or [module]


def _names_in_steps(cls: type) -> set[str]:
    """Attributes that the steps, and the methods of the class that they call, look up."""
    names: set[str] = set()
    todo = [*STEPS]
    while todo:
        method = getattr(cls, todo.pop(), None)
        if isinstance(method, FunctionType) and method.__module__ not in MODULES:
            new = {*method.__code__.co_names} - names - {"forward"}
            names |= new
            todo += new
    return names


def asked_for(function: Any) -> str:
    """What a user calls a function that Lightning gives a launcher: `fit` of `_fit_impl`."""
    return str(getattr(function, "__name__", "run")).strip("_").removesuffix("_impl")


def bars(trainer: Any) -> tuple[Any, ...]:
    """The classes of the progress bars that Lightning brings."""
    callbacks = _package(trainer, "callbacks")
    return callbacks.RichProgressBar, callbacks.TQDMProgressBar


def callback_class(trainer: Any) -> Any:
    return _package(trainer, "callbacks").Callback


def synchronize_norms(strategy: Any) -> None:
    """What `Trainer(sync_batchnorm=True)` asks a strategy for, before a fit."""
    if strategy._layer_sync:
        strategy.model = strategy._layer_sync.apply(strategy.model)


def tear_down(trainer: Any) -> None:
    """End what a run has begun: wrappers around the module, workers of loaders, handlers of signals."""
    trainer._teardown()


def tuning_ended(trainer: Any) -> type[BaseException]:
    """What is raised in `fit` when a callback has found a batch size or a learning rate."""
    ended: type[BaseException] = vars(_package(trainer, "utilities.exceptions"))["_TunerExitException"]
    return ended


def end_tuning(trainer: Any) -> None:
    """What Lightning does where it catches that."""
    call = _package(trainer, "trainer.call")
    call._call_teardown_hook(trainer)
    trainer._teardown()
    states = _package(trainer, "trainer.states")
    trainer.state.status, trainer.state.stage = states.TrainerStatus.FINISHED, None


def drop_own(trainer: Any) -> None:
    """Forget what each run makes anew and no other process can use: loaders as they were shared out, and a weak
    reference to the module."""
    fit = trainer.fit_loop
    for loop in (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        for name in LOOPS:
            setattr(loop, name, None)
    if hasattr(trainer.profiler, "_lightning_module"):
        trainer.profiler._lightning_module = None


@contextmanager
def own_samplers(trainer: Any) -> Iterator[None]:
    """Loaders keep their samplers: batches are dealt out by nbtrain."""
    connector = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, False
    try:
        yield
    finally:
        connector.use_distributed_sampler = before


def replace_batches(loader: Any, make: Callable[[Any], Any]) -> Any:
    """Put another sampler of batches into a loader for predictions, whose batches Lightning keeps account of."""
    account = loader.batch_sampler
    account._batch_sampler = made = make(account._batch_sampler)
    return made


def _package(trainer: Any, module: str) -> Any:
    """A module of the package that this trainer's class, or its base, is of."""
    for cls in type(trainer).__mro__:
        root, inside, _ = cls.__module__.partition(".trainer.trainer")
        if inside:
            return sys.modules[f"{root}.{module}"]
    raise TypeError(f"{type(trainer).__name__} is no Trainer of Lightning's")


def tell_rank(rank: int) -> None:
    """Lightning asks for it once, when it is imported: here that may have been in the process that ranks are forked
    from."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank
