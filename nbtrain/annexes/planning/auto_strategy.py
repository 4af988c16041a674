"""`--strategy auto` on several devices: ddp, or the plan's alternative where a model does not fit under ddp."""

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

_kept: MutableMapping[nn.Module, tuple[str, Mapping[str, Any]]] = weakref.WeakKeyDictionary()
"""model → the strategy that was chosen for it"""
_fitted: MutableMapping[nn.Module, tuple[PoolSpec, str, int]] = weakref.WeakKeyDictionary()
"""model → where it was found to fit, so that it is not looked at again for each cell"""


def advise(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int] = (), keep: bool = True
) -> tuple[RunSpec, str]:
    """The run with the strategy that `auto` chooses, and what to say about it. `pids`: processes of the ranks. A model
    stays with what was chosen for it once. `keep`: remember the choice; a trial does not."""
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
    where = run.pool, run.precision, run.accumulate
    for model in models.values():
        if model in _kept:
            strategy, options = _kept[model]
            return replace(run, strategy=strategy, options=options), ""
    if not optimizers:  # it evaluates
        return run, ""
    weights = _weights(models.values(), optimizers)
    if sum(p.nbytes for p in weights) < SMALL or all(_fitted.get(model) == where for model in models.values()):
        return run, ""
    name = " and ".join(models) or "the model"
    found = _instead(name, list(models.values()), weights, optimizers, run, pids)
    if found is None:
        if keep:
            _fitted.update(dict.fromkeys(models.values(), where))
        return run, ""
    ddp, best = found
    if keep:
        _kept.update(dict.fromkeys(models.values(), (best.base, best.options)))
    return replace(run, strategy=best.base, options=best.options), _said(name, ddp, best)


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

    at = DeviceMemory.of(run.pool, run.precision, run.accumulate, tuple(pids))
    if sum(p.nbytes for p in weights) * STATES < SHARE * min(one.bytes for one in at.each):
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

    found = [p for model in models for p in tensors_of(model)[0]]
    found += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in found if not is_lazy(p)}.values())
