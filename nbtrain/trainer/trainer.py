"""`nbtrain.Trainer`: writes a module's loop and runs it as a cell."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler

from nbtrain.errors import NotSupported, UsageError
from nbtrain.trainer import arguments, write_loop
from nbtrain.trainer.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from nbtrain.trainer.evaluation_parts import EvaluationParts
from nbtrain.trainer.given_data import as_one, as_several, as_written, given_or_asked, separated
from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.module import check, check_by_hand, check_data, has, provided, trainer_of
from nbtrain.trainer.optimizers import configured
from nbtrain.trainer.predictions import as_sequence
from nbtrain.trainer.run_cell import (
    errors_in_short,
    notebook,
    planned_ranks,
    refuse_on_a_rank,
    run_cell,
    script_here,
    try_cell,
)
from nbtrain.trainer.run_of_loop import Run
from nbtrain.training.checkpoints.folder import inside
from nbtrain.training.checkpoints.schedule import place_of

NAME = "trainer_run"
"""in the notebook's namespace, hidden: what the loop is given"""


class Trainer(EvaluationParts):
    """`nbtrain.Trainer(strategy="fsdp", devices=4, max_epochs=10).fit(module, loader)`, in an ordinary cell.

    Arguments have Lightning's names. `loop()` shows the loop that it wrote and ran last.
    """

    @errors_in_short()
    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        strategy: Any = "auto",
        precision: Any = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: int | bool = False,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        accumulate_grad_batches: Any = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        callbacks: Any = None,
        logger: Any = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        log_every_n_steps: int | None = None,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        deterministic: Any = None,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        profiler: Any = None,
        plugins: Any = None,
        default_root_dir: Any = None,
        **old: Any,
    ) -> None:
        known = inspect.signature(Trainer).parameters
        told = arguments.read(accelerator, devices, num_nodes, strategy, precision, plugins, old, known)
        for sentence in told.said:
            warnings.warn(sentence, FutureWarning, stacklevel=3)
        arguments.check_numbers({
            "limit_train_batches": limit_train_batches, "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches, "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches, "max_epochs": max_epochs, "min_epochs": min_epochs,
            "max_steps": max_steps, "min_steps": min_steps, "val_check_interval": val_check_interval,
            "check_val_every_n_epoch": check_val_every_n_epoch, "num_sanity_val_steps": num_sanity_val_steps,
            "gradient_clip_val": gradient_clip_val, "log_every_n_steps": log_every_n_steps,
            "accumulate_grad_batches": None if isinstance(accumulate_grad_batches, dict) else accumulate_grad_batches,
        })  # fmt: skip
        super().__init__()
        self._line, self._named = told.line, told.named
        use_distributed_sampler = told.others.get("use_distributed_sampler", use_distributed_sampler)
        if not use_distributed_sampler:
            self._line = f"{self._line} --no-sampler".strip()
        if enable_progress_bar is False:
            self._line = f"{self._line} --monitor off".strip()
        if profiler is not None:
            raise UsageError(
                "Trainer(profiler=…) is not supported: the dashboard and %distributed history show where time goes"
            )
        enable_checkpointing = told.others.get("enable_checkpointing", enable_checkpointing)
        self.resume_from: str | None = told.others.get("resume_from")
        self.sync_batchnorm = sync_batchnorm
        self.deterministic, self.benchmark, self.detect_anomaly = deterministic, benchmark, detect_anomaly
        self.fast_dev_run = int(fast_dev_run)
        if self.fast_dev_run:
            max_epochs, max_steps, enable_checkpointing = 1, self.fast_dev_run, None
            limit_train_batches = limit_val_batches = self.fast_dev_run
            limit_test_batches = limit_predict_batches = self.fast_dev_run
            num_sanity_val_steps = 0
        self.overfit_batches = overfit_batches
        if overfit_batches:
            limit_train_batches = limit_val_batches = overfit_batches
        self.max_epochs, self.min_epochs = max_epochs, min_epochs
        self.max_steps, self.min_steps = max_steps, min_steps
        self.max_time = arguments.seconds_of(max_time)
        self.limits = {
            "train": limit_train_batches, "validation": limit_val_batches, "test": limit_test_batches,
            "predict": limit_predict_batches,
        }  # fmt: skip
        self.val_check_interval = 1.0 if val_check_interval is None else val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val, gradient_clip_algorithm
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise UsageError(f"gradient_clip_algorithm={gradient_clip_algorithm!r}: 'norm' or 'value'")
        self.default_root_dir = str(default_root_dir or Path.cwd())
        self.loggers = arguments.loggers_of(logger)
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.callbacks = arguments.callbacks_of(callbacks, told.others.get("more_callbacks", []), enable_checkpointing)
        if self.fast_dev_run:
            self.callbacks = [one for one in self.callbacks if not isinstance(one, ModelCheckpoint)]
        self.checks_nan = True
        if isinstance(accumulate_grad_batches, dict):
            self.callbacks.append(GradientAccumulationScheduler(accumulate_grad_batches))
            accumulate_grad_batches = 1
        self.accumulate_grad_batches = int(accumulate_grad_batches)
        self.accumulates = self.accumulate_grad_batches > 1 or any(
            isinstance(one, GradientAccumulationScheduler) for one in self.callbacks
        )
        self._text = ""
        self.own_step: Any = None
        """in place of predict_step: called with the module and a batch"""
        self.is_aside = False
        """a few steps before a fit, of which nobody is to notice anything"""

    # -- what a user calls --------------------------------------------------------------------

    @errors_in_short()
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train, and validate in between. A second `fit` goes on where the first has ended.

        `weights_only`: of the checkpoint, as in `nbtrain.load`; None: where it is none that this trainer has saved.
        """
        check(model, "training_step")
        data, given = separated(train_dataloaders, datamodule)
        loop = self._prepare_fit(model, data, given, val_dataloaders, ckpt_path, weights_only)
        if loop is None:
            self.let_go()
            return
        self.run_fit(model, *loop, data)
        for callback in self.checkpoint_callbacks:
            callback.remove_spent(self)  # the last one is whole now

    def _prepare_fit(
        self, model: Any, data: Any, given: Any, val_dataloaders: Any, ckpt_path: Any, weights_only: bool | None
    ) -> tuple[Any, list[Any]] | None:
        """The loaders, once all that a loop is written of is there; None: there is nothing left to do."""
        check_by_hand(model, self)
        self._nothing_left = False
        with self._asked_in_the_notebook(model, data):
            self._begin("fit", model, data)
            train = as_one(given_or_asked(given, data, model, "train_dataloader", "fit"))
            val = given_or_asked(val_dataloaders, data, model, "val_dataloader", None)
        loaders = (
            as_several(val)
            if val is not None and has(model, "validation_step") and self.limits["validation"] != 0
            else []
        )
        if val_dataloaders is not None and not has(model, "validation_step"):
            self.print(f"{type(model).__name__} has no validation_step: the validation's loader is not used")
        if self.overfit_batches and isinstance(getattr(train, "sampler", None), RandomSampler):
            raise UsageError(
                "overfit_batches sees the same batches in each epoch, and the training loader shuffles: shuffle=False"
            )
        self.uses("validation", loaders)
        self.uses("train", [train])
        if not model.training:
            self.print(
                f"{type(model).__name__} is in eval mode and is trained so: without dropout, and batch norm stays as "
                "it is. If that is not meant, write module.train() before fit"
            )
        is_first = model is not self.module or not self.optimizers
        for one in self.callbacks if is_first and not (ckpt_path or self.resume_from) else ():
            if has(one, "before_fit"):
                other = one.before_fit(self, model, data, train, given is not None)
                train = train if other is None else as_one(other)
                self.uses("train", [train])
        self.validates, self.loaders_of_evaluation = bool(loaders), max(len(loaders), 1)
        with self._asked_in_the_notebook(model, data):
            self._set_up_optimizers(model)
        if self.averaging is not None:
            self.averaging.set_up(self, model, bool(ckpt_path or self.resume_from))
        self._resume(ckpt_path or self.resume_from, weights_only)
        if self.resumes_from:
            self._position = []
        elif self._position:
            self.print(f"goes on in epoch {self.current_epoch}, after {self._batches_left_at} batches of it")
        else:
            self.first_epoch = self.current_epoch
        if not self.resumes_from and self.is_done(self.current_epoch):
            self.say_that_all_is_done(self.current_epoch)
            if not self.averages_now():
                return None
            self._nothing_left = True  # a loop over no epochs, and the averaging after it
        self._checkpoints_go_to()
        for parameter in model.parameters():
            parameter.grad = None  # of a fit that was stopped: the loop begins with zero_grad, ranks need not get it
        return train, loaders

    @errors_in_short()
    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """What `validation_step` logs, a dictionary for each loader. Every sample counts once."""
        return self._evaluate(
            "validate", "validation", model, dataloaders, ckpt_path, verbose, datamodule, weights_only
        )

    @errors_in_short()
    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """What `test_step` logs, a dictionary for each loader. Every sample counts once."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @errors_in_short()
    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, ckpt_path: Any = None,
        return_predictions: bool | None = None, weights_only: bool | None = None,
    ) -> Any:  # fmt: skip
        """What `predict_step` (or the module itself) returns for each batch, in the loader's order."""
        model = self._model(model)
        if self.own_step is None and not has(model, "predict_step") and type(model).forward is torch.nn.Module.forward:
            raise UsageError(
                f"{type(model).__name__} has neither predict_step nor forward: write def predict_step(self, batch, "
                "batch_idx)"
            )
        data, given = separated(dataloaders, datamodule)
        with self._asked_in_the_notebook(model, data):
            self._begin("predict", model, data)
            loaders = as_several(given_or_asked(given, data, model, "predict_dataloader", "predict"))
        self.uses("predict", loaders)
        self.loaders_of_evaluation = len(loaders)
        self._resume(ckpt_path, weights_only)
        self.keeps_predictions = return_predictions is not False
        self.predictions_folder = self._free_folder("predictions")
        self._run("predict", model, write_loop.predict(self, model), [self, model, as_written(loaders)], data)
        found, self.predictions = self.predictions, []
        if return_predictions is False:
            return None
        if (script := script_here()) is not None:
            found, self.predicted_samples = script.of_rank_0((found, self.predicted_samples))
        found = [as_sequence(items) for items in found]
        return found[0] if len(found) == 1 else found

    def loop(self) -> str:
        """The loop that was written last."""
        return self._text

    # -- what is tried before a fit ------------------------------------------------------------

    def probe(self, module: Any, callbacks: list[Any], train_loader: Any, steps: int) -> None:
        """Trains a module for a few steps, as a fit would, of which this trainer notices nothing."""
        other = self._aside(module, callbacks, train_loader)
        other.max_steps = steps
        other.run_fit(module, train_loader, [], None)

    def largest_batch(self, module: Any, train_loader: Any, steps: int) -> int:
        """The largest size of a batch with which a few steps fit. The module stays as it is."""
        shell = notebook()
        if shell is None:
            raise NotSupported("the largest batch is found in a notebook, by ranks that may run out of memory")
        other = self._aside(module, [], train_loader)
        run = Run(other, module, other.loop_arguments(module, train_loader, []))
        line = f"{self._line} --find-batch --steps {steps}"
        found = try_cell(shell, line, _as_cell("fit", write_loop.fit(other, module)), {NAME: run, **self._named})
        if found.rows[0].why.startswith("stopped"):
            raise KeyboardInterrupt("the search for a batch size was stopped; nothing was trained")
        if found.best is None or not found.best.size:
            raise UsageError(f"no batch fits: {found.rows[0].why}")
        return int(found.best.size)

    def _aside(self, module: Any, callbacks: list[Any], train_loader: Any) -> Trainer:
        """One like this, without a past and without anything that is kept."""
        other = copy.copy(self)
        EvaluationParts.__init__(other)
        other.module, other.callbacks, other.loggers = module, callbacks, []
        other.uses("train", [train_loader])
        other.datamodule = self.datamodule
        with provided(module, other):
            other.optimizers = configured(module)[0]
        other.max_epochs, other.min_epochs, other.min_steps, other.max_time = -1, None, None, None
        other.max_steps, other.checks_nan, other.validates = -1, False, False
        other.is_aside = True
        return other

    def rates(self, module: Any) -> list[float]:
        """The learning rates that `configure_optimizers` begins with."""
        with provided(module, self):
            return [group["lr"] for optimizer in configured(module)[0] for group in optimizer.param_groups]

    # -- how it goes --------------------------------------------------------------------------

    def _held_by(self, model: Any, given: list[Any]) -> dict[str, Any]:
        """Where models, optimizers and loaders of a run may be, also those that the module or a callback has aside."""
        aside = {name: held for name, held in vars(model).items() if isinstance(held, list | tuple | dict)}
        aside = {name: held for name, held in aside.items() if name not in vars(torch.nn.Module())}
        return {
            "module": model, "loop": given[2:], "aside": aside, "callbacks": [vars(one) for one in self.callbacks],
        }  # fmt: skip

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        """A checkpoint from which any strategy goes on, with the trainer's own counters and callbacks.
        `weights_only`: the module alone."""
        self._written.add(str(place_of(path)))
        script = script_here() if runtime_here() is None else None
        if script is None:
            super().save_checkpoint(path, weights_only)
        else:  # outside of a run each process has all, and one of them writes it
            script.once(lambda: EvaluationParts.save_checkpoint(self, path, weights_only))

    def run_fit(self, model: Any, train: Any, loaders: list[Any], data: Any) -> None:
        self._run("fit", model, write_loop.fit(self, model), self.loop_arguments(model, train, loaders), data)

    def loop_arguments(self, model: Any, train: Any, loaders: list[Any]) -> list[Any]:
        """What the loop of a fit is called with."""
        found = [self, model, self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers]
        found += [[one.scheduler for one in self.schedules]] if self.schedules else []
        found += [self.averaging.average] if self.averaging is not None else []
        return [*found, train, *([as_written(loaders)] if loaders else [])]

    def _evaluate(
        self, what: str, stage: str, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:  # fmt: skip
        model = self._model(model)
        check(model, f"{stage}_step")
        data, given = separated(dataloaders, datamodule)
        name = f"{'val' if stage == 'validation' else stage}_dataloader"
        with self._asked_in_the_notebook(model, data):
            self._begin(what, model, data)
            loaders = as_several(given_or_asked(given, data, model, name, what))
        self.uses(stage, loaders)
        self.loaders_of_evaluation = len(loaders)
        self._resume(ckpt_path, weights_only)
        self._run(what, model, write_loop.evaluate(self, model, stage), [self, model, as_written(loaders)], data)
        found = [
            {name: float(value) for name, value in self.callback_metrics.items() if self.loader_of.get(name) == number}
            for number in range(len(loaders))
        ]
        if verbose:
            for metrics in filter(None, found):
                self.print("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        return found

    @contextmanager
    def _asked_in_the_notebook(self, model: Any, data: Any) -> Iterator[None]:
        """While `setup`, `configure_optimizers` and those that make loaders run, they have `self.trainer`, too."""
        try:
            with provided(model, self), trainer_of(data, self):
                yield
        except BaseException:
            self.let_go()
            raise

    def planned_ranks(self) -> tuple[int, int]:
        return planned_ranks(self._line, self._named)

    def _begin(self, what: str, model: Any, data: Any) -> None:
        refuse_on_a_rank(f"Trainer.{what}")
        check_data(data)
        model = self._model(model)
        self.let_go()  # of what a run that was prepared and never begun has left
        self.datamodule = data
        for one in (data, model):
            for name in ("prepare_data", "setup"):
                if one is None or not has(one, name):
                    continue
                if name == "setup":
                    one.setup(what)
                else:
                    _once_per_machine(one.prepare_data)
        for name in ("configure_sharded_model", "configure_model"):
            if has(model, name):
                getattr(model, name)()
        for one in self.callbacks:
            if has(one, "setup"):
                one.setup(self, model, what)

    def _model(self, model: Any) -> Any:
        if model is None:
            model = self.module
        if model is None:
            raise UsageError("which module? trainer.test(module, loader)")
        if model is not self.module:
            self.module, self.optimizers, self.schedules, self._position = model, [], [], []
        return model

    def _set_up_optimizers(self, model: Any) -> None:
        """Once: a second `fit` goes on with them, unless the module has other parameters by now."""
        held = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        if not self.optimizers or not held <= {id(p) for p in model.parameters()}:
            if self.sync_batchnorm:
                torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
            self.optimizers, self.schedules = configured(model)
        if not self.optimizers and getattr(model, "automatic_optimization", True):
            raise UsageError(
                f"{type(model).__name__} has no optimizer: write def configure_optimizers(self): return "
                "torch.optim.AdamW(self.parameters(), lr=1e-3)"
            )

    def _checkpoints_go_to(self) -> None:
        for one in self.checkpoint_callbacks:
            if not one.dirpath:
                one.dirpath = self._own_folder = str(Path(self._free_folder("version"), "checkpoints"))

    def _free_folder(self, name: str) -> str:
        """`trainer_logs/version_0`, or the first number after all that are there."""
        root = Path(self.default_root_dir, "trainer_logs")
        taken = [number for old in root.glob(f"{name}_*") if (number := old.name[len(name) + 1 :]).isdecimal()]
        found = str(root / f"{name}_{max(map(int, taken), default=-1) + 1}")
        script = script_here()
        return found if script is None else str(script.of_rank_0(found))

    def _resume(self, ckpt_path: Any, weights_only: bool | None) -> None:
        path = self.resumes_from = self._checkpoint(ckpt_path) if ckpt_path else ""
        if weights_only is None:
            weights_only = not (str(place_of(path)) in self._written or str(Path(path).parent) == self._own_folder)
        self.resumes_by = repr(path) if weights_only else f"{path!r}, weights_only=False"

    def _checkpoint(self, path: Any) -> str:
        if path not in ("best", "last"):
            return str(path)
        callback = self.checkpoint_callback
        found = getattr(callback, f"{path}_model_path", "") if callback is not None else ""
        if not found and path == "last" and not getattr(callback, "save_weights_only", False):
            found = self._newest_checkpoint()
        if not found:
            raise UsageError(f"ckpt_path={path!r}: this trainer has saved none yet. Name its folder")
        return str(found)

    @property
    def averaging(self) -> Any:
        return next((one for one in self.callbacks if isinstance(one, StochasticWeightAveraging)), None)

    def _newest_checkpoint(self) -> str:
        """Of all that trainers have left in this folder: a kernel may have ended since."""
        dirpath = getattr(self.checkpoint_callback, "dirpath", "")
        where = [Path(dirpath)] if dirpath else Path(self.default_root_dir, "trainer_logs").glob("*/checkpoints")
        for place in sorted(where, key=_version, reverse=True):
            if made := inside(place):
                return str(made[-1][0])
        return ""

    def _run(self, what: str, model: Any, text: str, given: list[Any], data: Any) -> None:
        self._text = text
        run = Run(self, model, given)
        cell, names = _as_cell(what, text), {NAME: run, **self._named}
        shell, script = notebook(), script_here()
        try:
            if script is not None:
                script.run(self._line, f"<Trainer.{what}>", cell, names, self._held_by(model, given))
            else:
                run_cell(shell, self._line, cell, names)
        finally:
            if shell is not None:
                shell.user_ns.pop(write_loop.NAME.format(what=what), None)
            for one in () if self.is_aside else (data, model):
                if one is not None and has(one, "teardown"):
                    one.teardown(what)
            for one in self.callbacks:
                if has(one, "teardown"):
                    one.teardown(self, model, what)
            self.let_go()


def _version(checkpoints: Path) -> int:
    number = checkpoints.parent.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def _as_cell(what: str, text: str) -> str:
    return f"{text}\n\nwith {NAME}:\n    {write_loop.NAME.format(what=what)}(*{NAME}.given)\n"


def _once_per_machine(function: Any) -> None:
    """The processes that torchrun has started would all download the same."""
    script = script_here()
    if script is None:
        function()
    else:
        script.once(function, on_each_machine=True)
