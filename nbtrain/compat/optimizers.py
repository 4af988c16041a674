"""Optimizers and schedules: hooks around a step, and the marks that schedules leave. Nothing here imports torch.

All of it is there in torch 2.8 to 2.15.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch")

MARK = "_wrapped_by_lr_sched"
"""A schedule looks for it on an optimizer's `step`, to warn of steps that it cannot see."""
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip
ALL_HOOKS = (*_STEP_HOOKS, *_STATE_HOOKS)
"""The tables behind `register_…_hook`, each an attribute of every optimizer."""
its.fields("torch.optim.Optimizer", *ALL_HOOKS)
its.members("torch.optim.Optimizer", "_patch_step_function")
its.fields("torch.optim.lr_scheduler.SequentialLR", "_schedulers", "_milestones")


def make_hook_tables(optimizer: Any) -> None:
    """Make the tables that an optimizer's constructor makes, for one that is made without it."""
    for name in ALL_HOOKS:
        setattr(optimizer, name, OrderedDict())


def without_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's attributes, but for its tables of hooks and what is put around its methods."""
    left_out = {*_STEP_HOOKS, *_STATE_HOOKS, "step", "zero_grad"}
    return {name: value for name, value in attributes.items() if name not in left_out}


def unhooked(cls: type[Any]) -> Callable[..., Any]:
    """`step` below the wrapper by which torch calls everybody's hooks: these steps are nobody's business."""
    step: Callable[..., Any] = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def prepare_step(optimizer: Any) -> None:
    """Have torch notice an optimizer's steps (hooks, profiler), as the constructor does. Not those of a wrapper around
    one, whose constructor does without torch's: it would be its class that is patched, for hooks that none has."""
    if "param_groups" in vars(optimizer):
        optimizer._patch_step_function()


def calls_hooks(optimizer: Any) -> bool:
    """Not a wrapper around an optimizer whose constructor does without torch's."""
    return _STEP_HOOKS[0] in vars(optimizer)


def call_last_before_step(optimizer: Any, hook: Any) -> None:
    """Move a hook, given by its handle, behind all others that are called before a step."""
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id)


def call_first_after_step(optimizer: Any, hook: Any) -> None:
    """Move a hook, given by its handle, before all others that are called after a step."""
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)


def say_stepped(optimizer: Any) -> None:
    """Note a step as a schedule's wrapper around `step` does; else the schedule warns that it came before the first."""
    optimizer._opt_called = True


def has_schedule_mark(step: Any) -> bool:
    return hasattr(step, MARK)


def watch_for_schedule(optimizer: Any, schedule: Any) -> None:
    """Mark an optimizer's `step` as a schedule does when it is made; ReduceLROnPlateau leaves no mark."""
    if "step" in vars(optimizer) or not hasattr(schedule, "_step_count"):
        return
    prepare_step(optimizer)  # else, of a class that nobody has made one of in this process, it would call no hook
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        say_stepped(optimizer)
        return plain(optimizer, *args, **kwargs)

    setattr(step, MARK, True)
    optimizer.step = step


def inner_schedules(schedule: Any) -> list[Any]:
    """The schedules that a SequentialLR or a ChainedScheduler is made of, in their order."""
    from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

    return list(schedule._schedulers) if isinstance(schedule, (SequentialLR, ChainedScheduler)) else []


def milestones(schedule: Any) -> list[int]:
    """The steps after which a SequentialLR goes on with its next schedule; none of a ChainedScheduler, whose schedules
    move together."""
    steps: list[int] = getattr(schedule, "_milestones", [])
    return steps
