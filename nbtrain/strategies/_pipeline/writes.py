"""Parameters that a cell updates by hand, one from another: an average of weights, as a rule.

What both have on one rank is done there: a captured copy of a model is cut as the model is. On the others there is
nothing to do. What this rank has is not updated from what it has not: that would be NaN, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nbtrain.errors import NotSupported
from nbtrain.intercept import DRAWS, UPDATES, Listeners, While
from nbtrain.strategies._pipeline.holding import Holding

DRAWN = (
    "{name} was called on a parameter that another rank has (nn.init, reset_parameters()?): under pipeline each rank "
    "has its own stage alone. Initialize the model in a cell that is not distributed, or use --strategy ddp"
)
AVERAGE = (
    "a tensor was updated from a parameter that another rank has (an average of weights, in a copy that the cell "
    "made?): under pipeline each rank has its own stage alone. Make the copy in the notebook, before the cell, so that "
    "it is cut as the model is, or use --strategy ddp"
)


class Writes:
    """Of one component, while a cell runs."""

    def __init__(self, holding: Holding) -> None:
        self.ids = {id(t) for t in holding.owners.owned if holding.foreign(t)}

    def on(self) -> None:
        _while.on(self)

    def off(self) -> None:
        _while.off(self)


def _put(listeners: Listeners) -> None:
    for name in (*UPDATES, *DRAWS):
        listeners.listen(f"torch.Tensor.{name}", "writes", partial(_checked, name))


_while: While[Writes] = While(_put)
_open = _while.owners


def _foreign(tensor: Any) -> bool:
    number = id(tensor)
    return any(number in writes.ids for writes in _open)


def _checked(name: str, old: Callable[..., Any]) -> Callable[..., Any]:
    def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _foreign(tensor):
            if name in DRAWS:
                raise NotSupported(DRAWN.format(name=name))
            return tensor
        if args and any(map(_foreign, args)):
            raise NotSupported(AVERAGE)
        return old(tensor, *args, **kwargs)

    return write
