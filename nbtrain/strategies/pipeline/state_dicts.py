"""`optimizer.load_state_dict()` in a cell, of optimizers whose parameters are in stages: what is loaded every rank has
whole, and keeps its own of. All else of it, and a model's, is reading and writing of tensors
(`strategies/kit/stage_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from nbtrain.intercept import Listeners, While
from nbtrain.strategies.pipeline.stage_parameters import StageParameters


class StateDicts:
    """Follows what a cell loads into one component."""

    def __init__(self, stage_parameters: StageParameters) -> None:
        self.stage_parameters = stage_parameters

    def on(self) -> None:
        _while.on(self)

    def off(self) -> None:
        _while.off(self)


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.optim.Optimizer.load_state_dict", "pipeline", _optimizer_load)


_while: While[StateDicts] = While(_put)
_open = _while.owners


def _optimizer_load(old: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = old(optimizer, *args, **kwargs)
        for dicts in _open:
            dicts.stage_parameters.learns(optimizer)
            dicts.stage_parameters.hide_states()
        return result

    return load_state_dict
