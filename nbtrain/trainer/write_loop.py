"""Writes the loop that a user would have written for a module: plain PyTorch, with no line that this one does not need.

`trainer` in it counts, logs and calls hooks. All that trains is in the text, so every strategy sees a plain loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbtrain.errors import UsageError
from nbtrain.trainer.module import has

NAME = "trainer_{what}"
"""of the function that the loop is in"""
CLIPPING = {
    "norm": "nn.utils.clip_grad_norm_({held}, {value})",
    "value": "nn.utils.clip_grad_value_({held}, {value})",
}


class Lines:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def add(self, *lines: str) -> None:
        for line in lines:
            self._lines.append("    " * self._depth + line)
            self._depth += line.endswith(":")

    def out(self, count: int = 1) -> None:
        self._depth -= count

    def text(self) -> str:
        """With what it needs of torch: the notebook may have given these names to something else."""
        head, *lines = self._lines
        imports = (("    import torch", "torch."), ("    from torch import nn", "nn.utils"))
        needed = [line for line, use in imports if any(use in one for one in lines)]
        text = "\n".join(line.rstrip() for line in [head, *needed, *lines])
        return text.replace("\n\n\n", "\n\n") + "\n"


def fit(trainer: Any, module: Any) -> str:
    """The text of `trainer_fit(trainer, module, optimizer, …)`."""
    automatic = getattr(module, "automatic_optimization", True)
    schedules = list(enumerate(trainer.schedules if automatic else ()))
    one, validates = len(trainer.optimizers) == 1, trainer.validates
    lines = Lines()
    lines.add(f"def {NAME.format(what='fit')}({', '.join(_takes(trainer))}):")
    if trainer.resumes_from:
        lines.add(f"trainer.restore({trainer.resumes_by})")
    lines.add("trainer.begin_fit()")
    if validates:
        lines.add("", "def validate():")
        _evaluation(lines, module, "validation", "val_loader", trainer.loaders_of_evaluation)
        lines.add("")
        lines.out()
        if trainer.num_sanity_val_steps:
            lines.add("with trainer.sanity_check():", "validate()")
            lines.out()
    lines.add("trainer.begin_training()")
    lines.add("for epoch in resumable(range(trainer.first_epoch, trainer.last_epoch)):")
    lines.add("trainer.begin_epoch(epoch)")
    lines.add("for batch_idx, batch in trainer.batches(train_loader):")
    if automatic:
        _automatic(lines, trainer, module, one)
    else:
        lines.add(f"trainer.note_output({_call(module, 'training_step')})")
    for number, schedule in schedules:
        if schedule.interval == "step":
            _schedule(lines, number, schedule, "batch_idx", trainer.averaging)
    lines.add("trainer.end_batch()")
    if validates and trainer.validates_within_epochs:
        lines.add("if trainer.validation_is_due(train_loader):", "validate()")
        lines.out()
    lines.out()
    _schedules_of_epochs(lines, schedules, trainer, by_metric=False)  # a validation sees the next epoch's rate
    if validates and not trainer.validates_within_epochs:
        every = trainer.check_val_every_n_epoch or 1
        if every > 1:
            lines.add(f"if (epoch + 1) % {every} == 0:")
        lines.add("validate()")
        lines.out(every > 1)
    lines.add("trainer.end_epoch()")
    _schedules_of_epochs(lines, schedules, trainer, by_metric=True)
    lines.add("trainer.checkpoint()")  # last: what it counts as done is done
    lines.add("if trainer.stops:", "break")
    lines.out(2)
    if automatic and one:
        lines.add("optimizer.zero_grad()")  # what is left of the last step need not come home
    elif automatic:
        lines.add("for optimizer in optimizers:", "optimizer.zero_grad()")
        lines.out()
    _averaged(lines, trainer, module)
    lines.add("trainer.end_training()")
    return lines.text()


def _takes(trainer: Any) -> list[str]:
    """The names of what the loop of a fit is called with, as `Trainer.loop_arguments` gives it."""
    found = ["trainer", "module", "optimizer" if len(trainer.optimizers) == 1 else "optimizers"]
    found += ["schedulers"] if trainer.schedules else []
    found += ["averaged"] if trainer.averaging is not None else []
    found.append("train_loader")
    if trainer.validates:
        found.append("val_loader" if trainer.loaders_of_evaluation == 1 else "val_loaders")
    return found


def _averaged(lines: Lines, trainer: Any, module: Any) -> None:
    """The module gets its averaged weights."""
    if trainer.averaging is not None:
        lines.add("if trainer.has_averaged(averaged):", "module.load_state_dict(averaged.module.state_dict())")
        if any(getattr(one, "running_mean", None) is not None for one in module.modules()):
            lines.add("with trainer.batch_statistics(), torch.no_grad():")  # of the averaged weights
            lines.add("for batch_idx, batch in trainer.batches(train_loader):", _call(module, "training_step"))
            lines.out(2)
        lines.out()


def evaluate(trainer: Any, module: Any, stage: str) -> str:
    """The text of `trainer_validate(…)` and `trainer_test(…)`."""
    what = {"validation": "validate"}.get(stage, stage)
    lines = Lines()
    lines.add(f"def {NAME.format(what=what)}(trainer, module, {_loaders(trainer)}):")
    if trainer.resumes_from:
        lines.add(f"trainer.restore_weights({trainer.resumes_by})")
    _evaluation(lines, module, stage, "loader", trainer.loaders_of_evaluation)
    return lines.text()


def predict(trainer: Any, module: Any) -> str:
    lines = Lines()
    lines.add(f"def {NAME.format(what='predict')}(trainer, module, {_loaders(trainer)}):")
    if trainer.resumes_from:
        lines.add(f"trainer.restore_weights({trainer.resumes_by})")
    lines.add("trainer.begin_evaluation('predict')", "with torch.no_grad():")
    deep = _over_batches(lines, "loader", trainer.loaders_of_evaluation, "shared_batches")
    step = "predict_step" if has(module, "predict_step") else "forward"
    call = _call(module, step, trainer.loaders_of_evaluation) if step == "predict_step" else "module(batch)"
    call = "trainer.own_step(module, batch)" if trainer.own_step is not None else call
    lines.add(f"trainer.keep({call})")
    lines.out(1 + deep)
    lines.add("trainer.end_predictions()")
    return lines.text()


def _loaders(trainer: Any) -> str:
    return "loader" if trainer.loaders_of_evaluation == 1 else "loaders"


def _over_batches(lines: Lines, loader: str, count: int, batches: str) -> int:
    """Begins the loop, or two of them where there are several loaders: returns how many."""
    if count == 1:
        lines.add(f"for batch_idx, batch in trainer.{batches}({loader}):")
        return 1
    lines.add(f"for dataloader_idx, {loader} in enumerate({loader}s):")
    lines.add(f"for batch_idx, batch in trainer.{batches}({loader}, dataloader_idx):")
    return 2


def _evaluation(lines: Lines, module: Any, stage: str, loader: str, count: int) -> None:
    lines.add(f"trainer.begin_evaluation({stage!r})", "with torch.no_grad():")  # which puts the module in eval mode
    deep = _over_batches(lines, loader, count, "batches")
    step = f"{stage}_step"
    call = _call(module, step, count)
    if has(module, f"{step}_end"):
        call = f"module.{step}_end({call})"  # every rank has the whole batch
    lines.add(f"trainer.note_output({call})", "trainer.end_batch()")
    lines.out(1 + deep)
    lines.add("trainer.end_evaluation()")


def _automatic(lines: Lines, trainer: Any, module: Any, one: bool) -> None:
    """Backward and step of one optimizer, or of each in turn."""
    if not one:
        lines.add("for optimizer_idx, optimizer in enumerate(optimizers):", "trainer.toggle_optimizer(optimizer)")
    if one and _wants_closure(trainer.optimizers[0]):
        _by_closure(lines, trainer, module)
        return
    call = _call(module, "training_step", optimizer_idx=not one)
    if has(module, "training_step_end"):
        call = f"module.training_step_end(trainer.of_all_ranks({call}))"
    divided = " / trainer.accumulate_grad_batches" if trainer.accumulates else ""
    lines.add(f"loss = trainer.loss_of({call}){divided}")
    hook = _hooks(lines, trainer, module)
    if trainer.accumulates:
        lines.add("if trainer.begins_group:")
    hook("on_before_zero_grad", "optimizer")
    lines.add("optimizer.zero_grad()")
    if trainer.accumulates:
        lines.out()
    hook("on_before_backward", "loss")
    lines.add("loss.backward()")
    hook("on_after_backward")
    if trainer.accumulates:
        lines.add("if trainer.ends_group(train_loader):")
    hook("on_before_optimizer_step", "optimizer")
    _clipping(lines, trainer, module)
    lines.add("optimizer.step()")
    if trainer.accumulates:
        lines.out()
    if not one:
        lines.add("trainer.untoggle_optimizer()")
        lines.out()


def _wants_closure(optimizer: Any) -> bool:
    """Like LBFGS, which computes the loss several times in a step."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _by_closure(lines: Lines, trainer: Any, module: Any) -> None:
    if trainer.accumulates or has(module, "training_step_end"):
        name = "accumulate_grad_batches" if trainer.accumulates else "training_step_end"
        raise UsageError(
            f"{type(trainer.optimizers[0]).__name__} computes the loss several times in a step, and {name} is made for "
            "optimizers that take one gradient: leave it out"
        )
    hook = _hooks(lines, trainer, module)
    lines.add("", "def closure():")
    lines.add(f"loss = trainer.loss_of({_call(module, 'training_step')})")
    hook("on_before_zero_grad", "optimizer")
    lines.add("optimizer.zero_grad()")
    hook("on_before_backward", "loss")
    lines.add("loss.backward()")
    hook("on_after_backward")
    hook("on_before_optimizer_step", "optimizer")
    _clipping(lines, trainer, module)
    lines.add("return loss", "")
    lines.out()
    lines.add("optimizer.step(closure)")


def _clipping(lines: Lines, trainer: Any, module: Any) -> None:
    """Of the parameters that the optimizer steps: gradients of others are not zeroed, and pile up."""
    if trainer.gradient_clip_val:
        clip = CLIPPING[trainer.gradient_clip_algorithm or "norm"]
        stepped = {id(p) for p in trainer.parameters_of(trainer.optimizers[0])}
        has_all = len(trainer.optimizers) == 1 and stepped == {id(p) for p in module.parameters()}
        held = "module.parameters()" if has_all else "trainer.parameters_of(optimizer)"
        lines.add(clip.format(held=held, value=trainer.gradient_clip_val))


def _hooks(lines: Lines, trainer: Any, module: Any) -> Callable[..., None]:
    def hook(name: str, *args: str) -> None:
        if any(has(one, name) for one in (module, *trainer.callbacks)):
            lines.add(f"trainer.call({', '.join((repr(name), *args))})")

    return hook


def _schedules_of_epochs(lines: Lines, schedules: list[Any], trainer: Any, *, by_metric: bool) -> None:
    """`by_metric`: those that need the metrics of the epoch, or follow its weights."""
    averages = trainer.averaging.schedule if trainer.averaging is not None else None
    for number, schedule in schedules:
        needs = isinstance(schedule.scheduler, ReduceLROnPlateau) or schedule is averages
        if schedule.interval == "epoch" and needs == by_metric:
            _schedule(lines, number, schedule, "epoch", trainer.averaging)


def _schedule(lines: Lines, number: int, schedule: Any, count: str, averaging: Any) -> None:
    if averaging is not None and schedule is averaging.schedule:
        lines.add(f"if epoch >= {averaging.first_epoch}:")
        lines.add("averaged.update_parameters(module)", f"schedulers[{number}].step()")
        lines.out()
        return
    plateau = isinstance(schedule.scheduler, ReduceLROnPlateau)
    conditions = ["trainer.has_stepped"] if schedule.interval == "step" else []
    conditions += [f"({count} + 1) % {schedule.frequency} == 0"] if schedule.frequency > 1 else []
    conditions += [f"{schedule.monitor!r} in trainer.callback_metrics"] if plateau and not schedule.strict else []
    conditions += [f"epoch < {averaging.first_epoch}"] if averaging is not None else []
    if conditions:
        lines.add(f"if {' and '.join(conditions)}:")
    metric = f"trainer.metric_of({schedule.monitor!r}, 'a schedule')" if plateau else ""
    lines.add(f"schedulers[{number}].step({metric})")
    lines.out(bool(conditions))


def _call(module: Any, step: str, loaders: int = 1, optimizer_idx: bool = False) -> str:
    """`module.training_step(batch, batch_idx)`, with what the step's signature takes."""
    try:
        named = list(inspect.signature(getattr(module, step)).parameters.values())
    except ValueError:  # not written in Python
        named = []
    names = {one.name for one in named}
    open_ended = any(one.kind is one.VAR_POSITIONAL for one in named)
    given = ["batch"]
    if len(named) > 1 or open_ended:
        given.append("batch_idx")
    if "dataloader_iter" in names:
        raise UsageError(f"{step}(dataloader_iter) is not there: write {step}(self, batch, batch_idx)")
    if optimizer_idx:
        if "optimizer_idx" not in names:
            raise UsageError(
                "configure_optimizers returns several optimizers: write training_step(self, batch, batch_idx, "
                "optimizer_idx), or self.automatic_optimization = False and step them in training_step"
            )
        given.append("optimizer_idx=optimizer_idx")
    takes = next((one for one in named if one.name == "dataloader_idx"), None)
    if loaders > 1:
        if takes is None and not open_ended:
            raise UsageError(f"there are several loaders: write {step}(self, batch, batch_idx, dataloader_idx)")
        given.append("dataloader_idx" if takes is None else "dataloader_idx=dataloader_idx")
    elif takes is not None and takes.default is takes.empty:
        given.append("dataloader_idx=0")
    return f"module.{step}({', '.join(given)})"
