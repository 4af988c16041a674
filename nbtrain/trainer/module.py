"""`nbtrain.Module` and `nbtrain.DataModule`, both optional, and what any module has while a Trainer runs it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.compat import lightning
from nbtrain.compat.modules import compiled
from nbtrain.errors import NotSupported, UsageError
from nbtrain.trainer.saved_hyperparameters import LEFT_OUT, saved_hyperparameters
from nbtrain.training.checkpoints.api import load
from nbtrain.training.checkpoints.safe_load import naming

OUTSIDE = "self.{name} is there while a Trainer runs: nbtrain.Trainer(…).fit(module)"
LIGHTNING = ("lightning.", "pytorch_lightning.")


class Hyperparameters(dict[str, Any]):
    """`self.hparams.lr`, and `self.hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r} was saved") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Module(nn.Module):
    """An `nn.Module` with the names that a `training_step` uses. Any `nn.Module` with that method does as well."""

    automatic_optimization = True
    """False: `training_step` calls `self.manual_backward`, and steps its optimizers itself"""

    def save_hyperparameters(self, *names: str, ignore: Any = ()) -> None:
        """Keep the arguments of `__init__`, or those named, as `self.hparams`."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None:
            return
        given = inspect.getargvalues(caller)
        found = {name: given.locals[name] for name in given.args[1:]}
        found |= given.locals[given.keywords] if given.keywords else {}
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        kept = {name: value for name, value in found.items() if name not in left_out and (not names or name in names)}
        self.__dict__.setdefault("hparams", Hyperparameters()).update(kept)

    @classmethod
    def load_from_checkpoint(cls, path: Any, weights_only: bool = True, **hyperparameters: Any) -> Any:
        """A module with the weights of a Trainer's checkpoint, made with the hyperparameters that were saved with it,
        or with those given. `weights_only` as in `nbtrain.load`."""
        takes = inspect.signature(cls).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        with naming(f"{cls.__name__}.load_from_checkpoint(path, weights_only=False)"):
            found = saved_hyperparameters(path, weights_only, lambda name: name not in hyperparameters)
            missing = [name for name in found.pop(LEFT_OUT, ()) if name not in hyperparameters]
            if missing:
                raise UsageError(
                    f"the checkpoint holds plain values, and not {' and '.join(missing)}: write "
                    f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=…' for name in missing)})"
                )
            saved = {name: value for name, value in found.items() if takes_all or name in takes}
            made = cls(**{**saved, **hyperparameters})
            load(path, model=made, weights_only=weights_only)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in PROVIDED or name == "trainer":
            raise AttributeError(OUTSIDE.format(name=name))
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        found = next(self.parameters(), None)
        return found.device if found is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        found = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return found if found is not None else torch.get_default_dtype()

    @property
    def current_epoch(self) -> int:
        found: int = self._asked("current_epoch", 0)
        return found

    @property
    def global_step(self) -> int:
        found: int = self._asked("global_step", 0)
        return found

    @property
    def global_rank(self) -> int:
        found: int = self._asked("global_rank", 0)
        return found

    @property
    def local_rank(self) -> int:
        found: int = self._asked("local_rank", 0)
        return found

    @property
    def logger(self) -> Any:
        return self._asked("logger", None)

    @property
    def loggers(self) -> list[Any]:
        found: list[Any] = self._asked("loggers", [])
        return found

    def _asked(self, name: str, otherwise: Any) -> Any:
        trainer = self.__dict__.get("trainer")
        return otherwise if trainer is None else getattr(trainer, name)

    def freeze(self) -> None:
        """No part of it is trained, and it is in eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        self.requires_grad_(True)
        self.train()


class DataModule:
    """Loaders in one object. Any object with `train_dataloader` does as well."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def teardown(self, stage: str) -> None: ...


class _Provided:
    """A function that a module has while it is run. A copy of the module shares it, and the trainer is not copied."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer = trainer
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.trainer, PROVIDED[self.name])(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Provided:
        return self


PROVIDED = {
    "log": "log",
    "log_dict": "log_dict",
    "optimizers": "module_optimizers",
    "lr_schedulers": "module_schedulers",
    "manual_backward": "manual_backward",
    "clip_gradients": "clip_gradients",
    "toggle_optimizer": "toggle_optimizer",
    "untoggle_optimizer": "untoggle_optimizer",
    "all_gather": "all_gather",
    "print": "print",
}
"""A module's name → the trainer's."""
MOVING = ("current_epoch", "global_step")
"""what a plain `nn.Module` has as numbers of its own, which the trainer keeps up to date"""
TOLD = (*MOVING, "device", "global_rank", "local_rank", "logger", "loggers")
"""what it has of the trainer's"""


def is_of_lightning(module: Any) -> bool:
    return any(cls.__module__.startswith(LIGHTNING) for cls in type(module).__mro__)


@contextmanager
def provided(module: Any, trainer: Any) -> Iterator[None]:
    """While it is run, the module has what a `training_step` uses: `self.log`, `self.trainer`, …"""
    of_lightning = is_of_lightning(module)
    given = {}
    for name in PROVIDED:
        own = getattr(module, name, None) if not (of_lightning or isinstance(module, Module)) else None
        if own is None or isinstance(own, _Provided):  # a copy has those of the trainer that the other one has
            given[name] = _Provided(trainer, name)
    if of_lightning:
        given |= lightning.asked_by_properties(trainer, trainer.device)
    elif not hasattr(module, "trainer") or hasattr(vars(module).get("trainer"), "numbers_of_module"):
        given["trainer"] = trainer
        if not isinstance(module, Module):
            given |= {name: getattr(trainer, name) for name in TOLD if not hasattr(module, name)}
    trainer.numbers_of_module([name for name in MOVING if name in given])
    before = {name: module.__dict__[name] for name in given if name in module.__dict__}
    module.__dict__.update(given)
    try:
        yield
    finally:
        for name in given:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


@contextmanager
def trainer_of(data: Any, trainer: Any) -> Iterator[None]:
    """A data module asks `self.trainer`, too."""
    if data is None:
        yield
        return
    before = getattr(data, "trainer", None)
    data.trainer = trainer
    try:
        yield
    finally:
        data.trainer = before


def has(module: Any, name: str) -> bool:
    """Whether the module has a hook of its own: Lightning's base has each of them, and does nothing there."""
    found = getattr(module, name, None)
    if not callable(found):
        return False
    function = getattr(found, "__func__", found)
    return not str(getattr(function, "__module__", "")).startswith(
        ("lightning.pytorch.core", "pytorch_lightning.core", "lightning.fabric", "lightning.pytorch.callbacks")
    )


TRANSFER = "batches are moved whatever they are made of; on_after_batch_transfer is called"
NOT_CALLED = {
    "optimizer_step": "a warm-up is a schedule of torch (LambdaLR, LinearLR) with 'interval': 'step'",
    "optimizer_zero_grad": "on_before_zero_grad is called; or automatic_optimization = False",
    "lr_scheduler_step": "schedules of torch are stepped; or automatic_optimization = False",
    "configure_gradient_clipping": "Trainer(gradient_clip_val=…); or automatic_optimization = False",
    "backward": "automatic_optimization = False, and self.manual_backward",
    "transfer_batch_to_device": TRANSFER,
    "configure_callbacks": "Trainer(callbacks=[…])",
}
"""hooks of Lightning's that would be another loop, and what to write"""


def check(module: Any, step: str) -> None:
    if isinstance(module, nn.Module) and compiled(module) is not None:
        raise UsageError("torch.compile(module) wraps the module: write module.compile(), which compiles it as it is")
    if not isinstance(module, nn.Module):
        raise UsageError(f"a Trainer runs an nn.Module, not {type(module).__name__}")
    if not has(module, step):
        raise UsageError(f"{type(module).__name__} has no {step}: write def {step}(self, batch, batch_idx)")
    for name, instead in NOT_CALLED.items():
        if has(module, name):
            raise NotSupported(
                f"{name} of {type(module).__name__} would not be called. {instead[0].upper()}{instead[1:]}"
            )


def check_by_hand(module: Any, trainer: Any) -> None:
    """A step that steps by hand is not helped: what a Trainer was asked to do for it would not be done."""
    if getattr(module, "automatic_optimization", True):
        return
    asked = {
        "gradient_clip_val": (trainer.gradient_clip_val, "self.clip_gradients(optimizer, gradient_clip_val=1.0)"),
        "accumulate_grad_batches": (trainer.accumulates, "if (batch_idx + 1) % 4 == 0: optimizer.step()"),
    }
    for name, (value, line) in asked.items():
        if value:
            raise UsageError(
                f"Trainer({name}=…), and {type(module).__name__} steps by hand (automatic_optimization = False), so "
                f"that nothing would come of it. Leave it out, and write in training_step: {line}"
            )


def check_data(data: Any) -> None:
    if data is not None and has(data, "transfer_batch_to_device"):
        raise NotSupported(f"transfer_batch_to_device of {type(data).__name__} would not be called: {TRANSFER}")
