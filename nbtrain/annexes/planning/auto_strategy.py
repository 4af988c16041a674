"""`--strategy auto` on several devices: ddp, or the plan's alternative where a model does not fit under ddp.

What `auto` means by the number and kind of devices alone is decided when the line is read (`magics/line/resolve.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableMapping
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

    from nbtrain.annexes.planning.plan.plan import Planned

SMALL = 32 * 10**6
"""Bytes of weights: smaller models fit everywhere, so nothing is looked at."""
STATES = 4
"""A weight, its gradient and two states of Adam."""
SHARE = 0.1
"""Share of the free memory that they may take before the plan is asked."""

Asked = tuple[PoolSpec, str, int, int]
"""what a plan depends on: the pool, precision, accumulation, and bytes of the model's weights"""
_planned: MutableMapping[nn.Module, tuple[Asked, str, Mapping[str, Any]]] = weakref.WeakKeyDictionary()
"""model → what was planned for it last: for which case, the strategy, and its options; ddp where that fits"""


def advise(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int] = (), keep: bool = True
) -> tuple[RunSpec, str]:
    """The run with the strategy that `auto` chooses, and what to say about it. `pids`: processes of the ranks. It plans
    once for a model and a pool, and keeps what that gave. `keep`: remember the choice; a trial does not."""
    if not may_be_too_large(run):
        return run, ""
    try:
        return _advised(names, notebook, run, pids, keep)
    except Exception:  # a custom optimizer, a missing driver …: the cell runs without advice
        return run, ""


def _advised(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int], keep: bool
) -> tuple[RunSpec, str]:
    models, optimizers = _found(names, notebook)
    if not models:
        return run, ""
    if not optimizers:  # it evaluates, with the model as it was last trained
        plans = [_planned[model] for model in models.values() if model in _planned]
        return _under(plans, run), ""
    asked: dict[nn.Module, Asked] = {
        model: (run.pool, run.precision, run.accumulate, sum(p.nbytes for p in _weights([model], ())))
        for model in models.values()
    }
    plans = [plan for model in asked if (plan := _planned.get(model)) is not None and plan[0] == asked[model]]
    if (planned := _under(plans, run)) is not run or len(plans) == len(asked):
        return planned, ""
    if keep:  # also where the plan fails: for the next cell it would fail, too
        _planned.update({model: (case, run.strategy, run.options) for model, case in asked.items()})
    name = " and ".join(models) or "the model"
    instead = _instead(name, list(models.values()), _weights(models.values(), optimizers), optimizers, run, pids)
    if instead is None:
        return run, ""
    ddp, best = instead
    if keep:
        _planned.update({model: (case, best.base, best.options) for model, case in asked.items()})
    return replace(run, strategy=best.base, options=best.options), _said(name, ddp, best)


def _under(plans: Iterable[tuple[Asked, str, Mapping[str, Any]]], run: RunSpec) -> RunSpec:
    """The run under the first strategy that one of these plans has found in place of its own."""
    other = ((strategy, options) for _, strategy, options in plans if strategy != run.strategy)
    strategy, options = next(other, (run.strategy, run.options))
    return run if strategy == run.strategy else replace(run, strategy=strategy, options=options)


def _instead(
    name: str,
    models: list[nn.Module],
    weights: list[torch.Tensor],
    optimizers: list[Optimizer],
    run: RunSpec,
    pids: Iterable[int],
) -> tuple[Planned, Planned] | None:
    """The rows of ddp, which does not fit, and of what does; None if ddp fits."""
    from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
    from nbtrain.annexes.planning.plan.quick_estimate import instead_of, weighed

    size = sum(p.nbytes for p in weights)
    if size < SMALL:
        return None
    at = DeviceMemory.of(run.pool, run.precision, run.accumulate, tuple(pids))
    if size * STATES < SHARE * min(memory.bytes for memory in at.each):
        return None
    return instead_of("ddp", weighed(name, models, weights, optimizers, run.precision), at)


def _said(name: str, ddp: Planned, best: Planned) -> str:
    least = humanize.size(best.peak)
    return (
        f"auto: without its activations, {name} takes {ddp.needs.partition(' needs ')[2]} under ddp, and there is room "
        f"for {ddp.may_have}; so it is trained under {best.name} from now on, which takes {least} "
        "(--strategy ddp uses ddp anyway)"
    )


def _found(names: Captured, notebook: Mapping[str, Any]) -> tuple[dict[str, nn.Module], list[Optimizer]]:
    """Models and optimizers that the cell reads by name."""
    from torch import nn
    from torch.optim import Optimizer

    models: dict[int, tuple[str, nn.Module]] = {}
    optimizers: list[Optimizer] = []
    for name in (*names.hard, *names.soft):
        value: Any = notebook[name] if name in notebook else None  # noqa: SIM401  # a namespace may have no `get`
        if issubclass(type(value), nn.Module):  # `isinstance` asks the object itself
            models.setdefault(id(value), (name, value))
        elif issubclass(type(value), Optimizer):
            optimizers.append(value)
    trained = [(name, model) for name, model in models.values() if any(p.requires_grad for p in model.parameters())]
    return dict(trained), optimizers


def _weights(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Parameters whose sizes are known."""
    from nbtrain.strategies.base import is_lazy

    tensors = [p for model in models for p in tensors_of(model)[0]]
    tensors += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in tensors if not is_lazy(p)}.values())
