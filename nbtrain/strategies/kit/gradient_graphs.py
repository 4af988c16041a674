"""Gradients that the ranks have averaged, and that are differentiated again: after `loss.backward(create_graph=True)`.

A penalty that is made of `p.grad`, or a Hessian's diagonal, goes through the average into each rank's own graph. Its
gradient is averaged on the way, as what the ranks compute of one average may differ, and once more where it arrives: in
`p.grad` as after any backward, and in the answers of `torch.autograd.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from nbtrain.compat import autograd_engine, tensors

Average = Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]
"""as `gradient_buckets.AllReduce.average`"""


class MeanOverRanks(torch.autograd.Function):
    """The ranks' means of some tensors, and in its backward those of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, average: Average, means: Sequence[torch.Tensor] | None, *own: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """`means`: of `own`, where they are known already; then `own` may lack what another rank has."""
        ctx.average, ctx.had = average, [gradient is not None for gradient in own]
        if means is None:
            means = _means(average, [gradient for gradient in own if gradient is not None])
        return tuple(mean.clone() for mean in means)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        means = MeanOverRanks.apply(ctx.average, None, *gradients)
        return None, None, *(mean if had else None for mean, had in zip(means, ctx.had, strict=True))


def _means(average: Average, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kinds: dict[Any, dict[int, torch.Tensor]] = {}
    for number, gradient in enumerate(own):
        kinds.setdefault((gradient.dtype, gradient.device), {})[number] = gradient
    by_number: dict[int, torch.Tensor] = {}
    for kind in kinds.values():
        sent = list(kind.values())
        by_number.update(zip(kind, tensors.unflatten(average(sent)(), sent), strict=True))
    return [by_number[number] for number in range(len(own))]


class GradientGraphs:
    """Around the averaging of gradients that have graphs. Made before it: copies of them are averaged."""

    def __init__(self, ids: Collection[int], parameters: Iterable[torch.Tensor]) -> None:
        """`ids`: of the parameters that take part."""
        self.parameters = [p for p in parameters if id(p) in ids]
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a parameter → (this rank's own gradient, its copy)"""
        for p in self.parameters:
            if (grad := p.grad) is not None and not grad.is_sparse:
                p.grad = grad.detach().clone()
                self.own[id(p)] = grad, p.grad

    def attach(self, average: Average) -> dict[int, ref[torch.Tensor]]:
        """Give the averages the graphs of what they were made of. Returns them, by the ids of their parameters."""
        followed: list[torch.Tensor] = []
        for p in self.parameters:
            own, copy = self.own.get(id(p), (None, None))
            if copy is not None and p.grad is copy and not tensors.version(copy):  # no rank has used it
                p.grad = own
            elif p.grad is not None and not p.grad.is_sparse:
                followed.append(p)
        graphs = [self.own.get(id(p), (None, None))[0] for p in followed]
        with torch.enable_grad():
            means = MeanOverRanks.apply(average, [p.grad for p in followed], *graphs)
        for p, mean in zip(followed, means, strict=True):
            p.grad = mean
        return {id(p): ref(mean) for p, mean in zip(followed, means, strict=True)}


def of_means(output: Any) -> bool:
    """Whether averaged gradients are part of its graph."""
    nodes = autograd_engine.nodes_below(output) if isinstance(output, torch.Tensor) else ()
    return any(autograd_engine.is_of(MeanOverRanks, node) for node in nodes)


def means_of(average: Average, own: Sequence[bool], inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """What `torch.autograd.grad` has found for these inputs, with the ranks' means for those that are the
    component's `own` parameters. Collective."""
    answers = list(gradients)
    at = list(compress(range(len(answers)), own))
    if not at:
        return answers
    used = torch.tensor([float(gradients[number] is not None) for number in at], device=inputs[at[0]].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    at = list(compress(at, used.tolist()))
    given = (torch.zeros_like(inputs[number]) if gradients[number] is None else gradients[number] for number in at)
    for number, mean in zip(at, MeanOverRanks.apply(average, None, *given), strict=True):
        answers[number] = mean
    return answers
