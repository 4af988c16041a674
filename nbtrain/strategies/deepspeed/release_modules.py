"""Finds out whether anybody but the engine holds the models: a cell may make them in a loop, one after another.

An engine holds its models in more places than could be emptied. So it is turned around for a moment: the modules hold
the engine, and nobody else does. If somebody holds one of the modules, engine and all stay; if nobody does, they are
found by the garbage collector together. What would hold them from outside is taken away meanwhile: what DeepSpeed has
hung on the parameters, which the old optimizer still holds when the next one is made, and what it keeps in tables of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer

if TYPE_CHECKING:
    from nbtrain.strategies.deepspeed.engine_parts import EngineParts
    from nbtrain.strategies.deepspeed.gradients import EngineGradients

Owner = TypeVar("Owner")

_HELD = "_nbtrain_engined"


def release_modules(owner: Owner, parts: EngineParts, gradients: EngineGradients) -> Callable[[], Owner | None]:
    """Between cells, or with nothing on that is on in one. What is returned takes it back, if it is still there."""
    hooks = [table for p in parts.trained if (table := tensors.hook_table(p, tensors.ACCUMULATED_HOOKS))]
    hung = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    times = ds.forget_module(parts.engine.module)
    modules = [module for model in parts.models for module in model.modules()]
    parts.meanwhile = hooks, hung, modules
    for module in modules:
        vars(module)[_HELD] = owner
    alive, built, user, handle = ref(owner), ref(parts), ref(parts.user), ref(gradients.handle)
    steps, scale, number = isinstance(parts.inner, InnerOptimizer), parts.loss_scale, id(gradients)

    def hold_again() -> Owner | None:
        owner, parts = alive(), built()
        if owner is None or parts is None:
            scale.holding.discard(number)
            if (optimizer := user()) is not None:  # what it held of the engine's means nothing any more
                if (found := handle()) is not None:
                    found.take_off()
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.grad = None
                if steps:
                    optimizer.state.clear()
            return None
        hooks, hung, modules = parts.meanwhile
        parts.meanwhile = None
        for module in modules:
            vars(module).pop(_HELD, None)
        for table, own in zip(hooks, hung, strict=True):
            table.update(own)
        ds.remember_module(parts.engine.module, times)
        return owner

    return hold_again
