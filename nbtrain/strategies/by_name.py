"""`torch.autograd.grad(loss, weights)` where weights are in pieces.

What the graph of a forward knows are the gathered weights: their gradients are asked for. A backward would leave the
ranks' mean of them, each rank its part, so that is what is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbtrain.compat import dtensor
from nbtrain.strategies.mixing import mean_of_ranks, part_of

NAMES = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)

Grad = Callable[..., Any]


def gradients(
    grad: Grad,
    inputs: list[Any],
    twin_of: Callable[[torch.Tensor], torch.Tensor | None],
    mine: Callable[[torch.Tensor], bool],
    args: Any,
    kwargs: Any,
) -> tuple[Any, ...]:
    """`grad(inputs, ...)`: torch's. `twin_of`: what is gathered of a parameter in pieces. `mine`: it is one of those,
    or what is gathered of one."""
    kwargs = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    zeros = kwargs.pop("materialize_grads", False)
    unused = kwargs.pop("allow_unused", None) or zeros
    twins = [twin if (twin := twin_of(one)) is not None and twin.requires_grad else None for one in inputs]
    asked = [*inputs, *(twin for twin in twins if twin is not None)]
    found = iter(dtensor.untouched(grad, asked, allow_unused=True, **kwargs))
    own = [next(found) for _ in inputs]
    answers: list[Any] = []
    for one, gradient, twin in zip(inputs, own, twins, strict=True):
        of_twin = None if twin is None else next(found)
        if of_twin is not None:
            part = part_of(mean_of_ranks(of_twin).to(one.dtype), one)
            gradient = part if gradient is None else gradient + part
        elif gradient is not None and not isinstance(one, DTensor) and mine(one):
            gradient = mean_of_ranks(gradient)
        if gradient is None and not unused:
            raise RuntimeError(UNUSED)
        answers.append(torch.zeros_like(one) if gradient is None and zeros else gradient)
    return tuple(answers)
