"""`torch.utils.checkpoint(..., use_reentrant=True)` begins a backward inside of the one under way, and ends it.

A strategy that sends gradients as they arrive takes that for the end of all: a layer that is used in two of them is
sent half, or twice; and it finds no gradients where a graph begins with a stage. Without re-entering autograd the same
is computed again, in the one backward. Where nothing that is given requires a gradient, a checkpoint that re-enters
gives none to the weights either: that one is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat.intercept import Listeners, While

GIVEN = (
    "functional_call of a model that recomputes activations (torch.utils.checkpoint): in the backward the model would "
    "compute them with its own weights, and not with those given. Call it without the checkpoint"
)
weights_given = [False]
"""whether a model is called that has other weights than its own for just this call"""


def _checkpoint(old: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        followed = any(isinstance(operand, torch.Tensor) and operand.requires_grad for operand in args)
        if weights_given[0] and torch.is_grad_enabled():
            raise NotSupported(GIVEN)
        if followed and torch.is_grad_enabled():
            use_reentrant = False
        return old(function, *args, use_reentrant=use_reentrant, **kwargs)

    return checkpoint


def put(listeners: Listeners) -> None:
    listeners.listen("torch.utils.checkpoint.checkpoint", "divided", _checkpoint)


listening: While[object] = While(put)
"""Components whose cells run."""
