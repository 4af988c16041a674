"""`--strategy auto` on several devices: ddp, or the plan's alternative where a model does not fit under ddp.

What `auto` means by the number and kind of devices alone is decided when the line is read (`magics/line/resolve.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import nbtrain.base.humanize as humanize
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.compat.modules import tensors_of
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.session import may_be_too_large

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

SMALL = 32 * 10**6
"""Bytes of weights: smaller models fit everywhere, so nothing is looked at."""
STATES = 4
"""A weight, its gradient and two states of Adam."""
SHARE = 0.1
"""Share of the free memory that they may take before the plan is asked."""

Asked = tuple[PoolSpec, str, int, int]
"""what a plan depends on: the pool, precision, accumulation, and bytes of the model's weights"""
_kept: MutableMapping[nn.Module, tuple[Asked, Mapping[str, Any]]] = weakref.WeakKeyDictionary()
"""model → for which case it was planned last, and what that changes of a run; nothing where it fits under ddp"""


def advise(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int] = (), keep: bool = True
) -> tuple[RunSpec, str]:
    """The run with the strategy that `auto` chooses, and what to say about it. `pids`: processes of the ranks. It plans
    once for a model and a pool, and keeps what that gave. `keep`: remember the choice; a trial does not."""
    if not may_be_too_large(run):
        return run, ""
    try:
        changes, said = _changes(names, notebook, run, pids, keep)
    except Exception:  # a custom optimizer, a missing driver …: the cell runs without advice
        return run, ""
    return replace(run, **changes), said


def _changes(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int], keep: bool
) -> tuple[Mapping[str, Any], str]:
    """What changes of the run, and what to say about it."""
    models, optimizers = _found(names, notebook)
    asked: dict[nn.Module, Asked] = {
        model: (run.pool, run.precision, run.accumulate, sum(p.nbytes for p in _weights([model], ())))
        for model in (models if optimizers else ())
    }
    # A cell without an optimizer evaluates, with the model as it was last trained.
    kept = [_kept[one][1] for one in models if one in _kept and asked.get(one) in (None, _kept[one][0])]
    if not optimizers or any(kept) or len(kept) == len(models):
        return next(filter(None, kept), {}), ""
    changes: Mapping[str, Any] = {}
    try:
        changes, said = _planned(models, optimizers, run, pids)
    finally:
        if keep:  # also where the plan fails: for the next cell it would fail, too
            _kept.update({model: (case, changes) for model, case in asked.items()})
    return changes, said


def _planned(
    models: Mapping[nn.Module, str], optimizers: Collection[Optimizer], run: RunSpec, pids: Iterable[int]
) -> tuple[Mapping[str, Any], str]:
    weights = _weights(models, optimizers)
    size = sum(p.nbytes for p in weights)
    if size < SMALL:
        return {}, ""
    from nbtrain.annexes.planning.plan import quick_estimate
    from nbtrain.annexes.planning.plan.device_memory import DeviceMemory

    at = DeviceMemory.of(run.pool, run.precision, run.accumulate, tuple(pids))
    if size * STATES < SHARE * min(memory.bytes for memory in at.each):
        return {}, ""
    rows = quick_estimate.instead_of_ddp(models, weights, optimizers, at)
    if rows is None:
        return {}, ""
    ddp, best = rows
    said = (
        f"auto: without its activations, {' and '.join(models.values())} takes {ddp.needs.partition(' needs ')[2]} "
        f"under ddp, and there is room for {ddp.may_have}; so it is trained under {best.name} from now on, which takes "
        f"{humanize.size(best.peak)} (--strategy ddp uses ddp anyway)"
    )
    return {"strategy": best.base, "options": best.options}, said


def _found(names: Captured, notebook: Mapping[str, Any]) -> tuple[dict[nn.Module, str], list[Optimizer]]:
    """Models, with their names, and optimizers that the cell reads."""
    from torch import nn
    from torch.optim import Optimizer

    models: dict[nn.Module, str] = {}
    optimizers: list[Optimizer] = []
    for name in (*names.hard, *names.soft):
        value: Any = notebook[name] if name in notebook else None  # noqa: SIM401  # a namespace may have no `get`
        if issubclass(type(value), Optimizer):  # `isinstance` asks the object itself
            optimizers.append(value)
        elif issubclass(type(value), nn.Module) and any(p.requires_grad for p in value.parameters()):
            models.setdefault(value, name)
    return models, optimizers


def _weights(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Parameters whose sizes are known: those of lazy layers are decided by the first batch."""
    from nbtrain.strategies.base import is_lazy

    tensors = [p for model in models for p in tensors_of(model)[0]]
    tensors += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in tensors if not is_lazy(p)}.values())
