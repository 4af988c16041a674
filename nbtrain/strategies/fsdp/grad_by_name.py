"""`torch.autograd.grad(loss, weights)` where weights are in pieces.

What the graph of a forward knows are the gathered weights: their gradients are asked for. A backward would leave the
ranks' mean of them, each rank its part, so that is what is answered. Which weights a rank's graph has may depend on its
batch: a rank that did not use one gives zeros for it, as in a backward, and unused is what no rank has used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbtrain.compat import dtensor
from nbtrain.strategies.fsdp.mixed_operands import mean_of_ranks, part_of

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
    # Of a weight's gradient a rank has all, from its own batch; `here` is what it has, by the weight as graphs know it.
    here: list[tuple[torch.Tensor, torch.Tensor | None] | None] = []
    for number, (one, twin) in enumerate(zip(inputs, twins, strict=True)):
        if twin is not None:
            here.append((twin, next(found)))
        elif not isinstance(one, DTensor) and mine(one):
            here.append((one, own[number]))
            own[number] = None
        else:
            here.append(None)
    means = iter(_means([pair for pair in here if pair is not None], kwargs))
    answers: list[Any] = []
    for one, gradient, pair in zip(inputs, own, here, strict=True):
        mean = None if pair is None else next(means)
        if mean is not None:
            part = part_of(mean.to(one.dtype), one) if isinstance(one, DTensor) else mean
            gradient = part if gradient is None else gradient + part
        if gradient is None and not unused:
            raise RuntimeError(UNUSED)
        answers.append(torch.zeros_like(one) if gradient is None and zeros else gradient)
    return tuple(answers)


def _means(pairs: list[tuple[torch.Tensor, torch.Tensor | None]], kwargs: Any) -> list[torch.Tensor | None]:
    """The mean of all ranks' gradients, by (weight, this rank's gradient); None where no rank has one. Collective."""
    if not pairs:
        return []
    used = torch.tensor([float(gradient is not None) for _, gradient in pairs], device=pairs[0][0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    batch = (len(_first(kwargs["grad_outputs"])),) if kwargs.get("is_grads_batched") else ()

    def zeros(weight: torch.Tensor) -> torch.Tensor:
        return weight.new_zeros(batch + weight.shape, dtype=getattr(weight, "grad_dtype", None))  # of newer torch

    return [
        mean_of_ranks(zeros(weight) if gradient is None else gradient) if anywhere else None
        for (weight, gradient), anywhere in zip(pairs, used.tolist(), strict=True)
    ]


def _first(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else next(one for one in given if one is not None)
