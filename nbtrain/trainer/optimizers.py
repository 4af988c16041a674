"""What `configure_optimizers` returns, in each form that Lightning documents, as optimizers and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbtrain.errors import UsageError

FORMS = (
    "an optimizer, a list of them, ([optimizers], [schedules]), {'optimizer': …, 'lr_scheduler': …}, a tuple of such, "
    "or None"
)


@dataclass(slots=True)
class Schedule:
    """A learning rate schedule, and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str = ""
    """the metric that a ReduceLROnPlateau is given"""
    strict: bool = True
    name: str | None = None


def configured(module: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """Asks the module. In the notebook, before the ranks are: they get optimizers as in any cell."""
    asked = getattr(module, "configure_optimizers", None)
    found = asked() if asked is not None else None
    optimizers, schedules = _read(found)
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"configure_optimizers of {type(module).__name__} returns a {type(optimizer).__name__} of another "
                "model: none of its parameters is this module's. Write torch.optim.…(self.parameters())"
            )
    return optimizers, schedules


def _read(found: Any) -> tuple[list[Optimizer], list[Schedule]]:
    if found is None:
        return [], []
    if isinstance(found, Optimizer):
        return [found], []
    if isinstance(found, dict):
        if not isinstance(found.get("optimizer"), Optimizer):
            raise UsageError(f"configure_optimizers returned a dict without 'optimizer'. It may return {FORMS}")
        if "lr_scheduler" not in found and (meant := sorted(found.keys() & {"scheduler", "lr_schedulers"})):
            raise UsageError(f"configure_optimizers returned a dict with {meant[0]!r}: write 'lr_scheduler'")
        if unknown := found.keys() - {"optimizer", "lr_scheduler", "monitor"}:
            raise UsageError(
                f"configure_optimizers returned a dict with {sorted(unknown)[0]!r}, which is not there: optimizers "
                "that take turns in another way are stepped in training_step, with self.automatic_optimization = False"
            )
        given = found.get("lr_scheduler")
        if given is not None and not isinstance(given, dict) and "monitor" in found:
            given = {"scheduler": given, "monitor": found["monitor"]}
        return [found["optimizer"]], [_schedule(given)] if given is not None else []
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list) and not _is_way(found[1]):
        schedules = found[1] if isinstance(found[1], list) else [found[1]]
        return [one for part in found[0] for one in _read(part)[0]], [_schedule(one) for one in schedules]
    if isinstance(found, tuple | list):
        parts = [_read(part) for part in found]
        return [one for part, _ in parts for one in part], [one for _, part in parts for one in part]
    raise UsageError(f"configure_optimizers returned a {type(found).__name__}. It may return {FORMS}")


def _is_way(found: Any) -> bool:
    """To train a part of the parameters: an optimizer, or a dict with one."""
    return isinstance(found, Optimizer) or (isinstance(found, dict) and "optimizer" in found)


def _schedule(given: Any) -> Schedule:
    if not isinstance(given, dict):
        given = {"scheduler": given}
    known = {key: value for key, value in given.items() if key in Schedule.__dataclass_fields__}
    unknown = given.keys() - known.keys() - {"reduce_on_plateau"}
    if unknown or "scheduler" not in known:
        raise UsageError(
            f"a schedule of configure_optimizers has {', '.join(map(repr, given))}; it may have 'scheduler', "
            "'interval', 'frequency', 'monitor', 'strict' and 'name'"
        )
    schedule = Schedule(**{key: value for key, value in known.items() if value is not None})
    if schedule.interval not in ("epoch", "step"):
        raise UsageError(f"a schedule's interval is 'epoch' or 'step', not {schedule.interval!r}")
    if isinstance(schedule.scheduler, ReduceLROnPlateau) and not schedule.monitor:
        raise UsageError(
            "ReduceLROnPlateau needs a metric: {'scheduler': …, 'monitor': 'val_loss'} in configure_optimizers"
        )
    return schedule
