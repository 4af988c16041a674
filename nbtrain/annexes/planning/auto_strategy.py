"""`--strategy auto` on several devices: ddp, or the plan's alternative where a model does not fit under ddp.

What `auto` means by the number and kind of devices alone is decided when the line is read (`magics/line/resolve.py`).
The model is not run: what counts is its weights, gradients and the optimizer's state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.base import humanize
from nbtrain.base.specs import RunSpec
from nbtrain.compat.modules import tensors_of
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.session import may_be_too_large

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SMALL = 32 * 10**6
"""Bytes of weights: smaller models fit everywhere, so nothing is looked at."""

_kept: MutableMapping[nn.Module, tuple[Any, Mapping[str, Any]]] = weakref.WeakKeyDictionary()
"""model → for which case it was planned last, and what that changes of a run; nothing where it fits under ddp"""


def advise(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int] = (), keep: bool = True
) -> tuple[RunSpec, str]:
    """The run with the strategy that `auto` chooses, and what to say about it. `pids`: processes of the ranks. It plans
    once for a model and a pool, and keeps what that gave. `keep`: remember the choice; a trial does not."""
    if not may_be_too_large(run):
        return run, ""
    from torch import nn
    from torch.optim import Optimizer

    from nbtrain.strategies.base import is_lazy

    try:
        read = {name: notebook[name] for name in (*names.hard, *names.soft) if name in notebook}
        optimizers = [one for one in read.values() if issubclass(type(one), Optimizer)]  # `isinstance` asks the object
        modules = {name: one for name, one in read.items() if issubclass(type(one), nn.Module)}
        models = {one: name for name, one in modules.items() if any(p.requires_grad for p in one.parameters())}
        case = (run.pool, run.precision, run.accumulate)
        asked = {
            model: (*case, sum(p.nbytes for p in tensors_of(model)[0] if not is_lazy(p)))
            for model in (models if optimizers else ())
        }
        # A cell without an optimizer evaluates, with the model as it was last trained.
        kept = [_kept[one][1] for one in models if one in _kept and asked.get(one) in (None, _kept[one][0])]
        if not optimizers or any(kept) or len(kept) == len(models):
            return replace(run, **next(filter(None, kept), {})), ""
        changes: Mapping[str, Any] = {}
        said = ""
        try:
            if sum(size for *_, size in asked.values()) >= SMALL:
                changes, said = planned(models, optimizers, run, tuple(pids))
        finally:
            if keep:  # also where the plan fails: for the next cell it would fail, too
                _kept.update({model: (case_of, changes) for model, case_of in asked.items()})
        return replace(run, **changes), said
    except Exception:  # a custom optimizer, a missing driver …: the cell runs without advice
        return run, ""


def planned(
    models: Mapping[nn.Module, str], optimizers: Sequence[Optimizer], run: RunSpec, pids: tuple[int, ...]
) -> tuple[Mapping[str, Any], str]:
    """What changes of the run, and what to say about it."""
    from nbtrain.annexes.planning.plan import guide
    from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
    from nbtrain.annexes.planning.plan.plan import Plan
    from nbtrain.annexes.planning.plan.plan_rows import candidates
    from nbtrain.annexes.planning.plan.plan_rows import planned as row_of
    from nbtrain.annexes.planning.profile.profile import without_activations

    at = DeviceMemory.of(run.pool, run.precision, run.accumulate, pids)
    profile = without_activations(models, optimizers, run.precision)
    named = [one for one in candidates({}, {}, run.pool.nodes) if guide.place(one.name) is not None]
    plan = Plan(
        profile=profile, devices=at, rows=tuple(row_of(one, profile, at) for one in named if one.name != "single")
    )
    ddp, best = plan.row("ddp"), plan.best()
    if best is None or ddp is None or ddp.fits is not False:
        return {}, ""
    said = (
        f"auto: without its activations, {' and '.join(models.values())} takes {ddp.needs.partition(' needs ')[2]} "
        f"under ddp, and there is room for {ddp.may_have}; so it is trained under {best.name} from now on, which takes "
        f"{humanize.size(best.peak)} (--strategy ddp uses ddp anyway)"
    )
    return {"strategy": best.base, "options": best.options}, said
