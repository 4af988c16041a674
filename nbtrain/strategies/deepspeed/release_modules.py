"""Finds out whether anybody but the engine holds the models: a cell may make them in a loop, one after another.

An engine holds its models in more places than could be emptied. So it is turned around for a moment: the modules hold
the engine, and nobody else does. If somebody holds one of the modules, engine and all stay; if nobody does, they are
found by the garbage collector together. What would hold them from outside is taken away meanwhile: what DeepSpeed has
hung on the parameters, which the old optimizer still holds when the next one is made, and what it keeps in tables of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.strategies.deepspeed.inner_optimizer import Inner

if TYPE_CHECKING:
    from nbtrain.strategies.deepspeed.engine import Engined

_HELD = "_nbtrain_engined"


def let_go(owner: Engined) -> Callable[[], Engined | None]:
    """What is returned takes it back, if it is still there."""
    entered = owner.entered
    if entered:  # between cells nothing of this is on
        owner.surroundings.close()
        owner.attachments.take_off()
    hooks = [table for p in owner.trained if (table := tensors.hook_table(p, tensors.ACCUMULATED_HOOKS))]
    hung = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    times = ds.forget_module(owner.engine.module)
    parts = [part for model in owner.models for part in model.modules()]
    owner.meanwhile = hooks, hung, parts
    for part in parts:
        vars(part)[_HELD] = owner
    alive, user, handle = ref(owner), ref(owner.user), ref(owner.gradients.handle)
    steps, scale, number = isinstance(owner.inner, Inner), owner.loss_scale, id(owner.gradients)

    def hold_again() -> Engined | None:
        owner = alive()
        if owner is None:
            scale.holding.discard(number)
            if (optimizer := user()) is not None:  # what it held of the engine's means nothing any more
                if (worn := handle()) is not None:
                    worn.take_off()
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.grad = None
                if steps:
                    optimizer.state.clear()
            return None
        hooks, hung, parts = owner.meanwhile
        owner.meanwhile = None
        for part in parts:
            vars(part).pop(_HELD, None)
        for table, own in zip(hooks, hung, strict=True):
            table.update(own)
        ds.remember_module(owner.engine.module, times)
        if entered:
            owner.attachments.put_back()
            owner.surround()
        return owner

    return hold_again
