"""Gradients of parameters that every rank has whole: those of several stages (tied weights), and the root's own.

What a stage does with one is done by its owner alone; what happens outside of stages (a loss term over the parameters,
a forward that every rank computes) is done by every rank, and counts on the first. So the sum over the ranks is what
one process has. It is taken once, at the end of a backward, over what that backward has brought.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.kit.named_tensors import hooked
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_messages import advising

DIFFERENT = (
    "the ranks start backwards from different losses ({losses}): under pipeline all ranks see the same batches "
    "and compute one and the same loss. Let nothing in the loop depend on the rank, and draw random numbers from "
    "torch's own stream, which is the same on all ranks; or take --strategy ddp, where each rank has its own loss"
)
SEES = "under pipeline would see the gradient of one micro-batch, and that on one rank"
"""a hook on a gradient"""


class TiedGradients:
    """`enter` and `leave` with each cell; `backward` around each backward."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        foreign: Iterable[torch.Tensor],
        own: Iterable[torch.Tensor],
        place: StagePlace,
    ) -> None:
        """`foreign`: those that are another rank's, of which this one has stand-ins. `own`: this rank's."""
        self.parameters, self.foreign, self.own = list(parameters), list(foreign), list(own)
        self.place, self.rank, self.device = place, place.rank, place.device
        self._hooks: list[Any] = []

    def enter(self) -> None:
        self.leave()
        if self.rank:
            self._hooks = [p.register_hook(self._counted) for p in self.parameters if p.requires_grad]

    def leave(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _counted(self, grad: torch.Tensor) -> torch.Tensor | None:
        return None if self.place.inside else torch.zeros_like(grad)

    @contextmanager
    def backward(self) -> Iterator[float]:
        """Yields what the loss counts. Collective at its end."""
        if self.place.inside:
            yield 1.0
            return
        shared = set(map(id, self.parameters))  # these have hooks of ours
        with tensors.as_plain_tensors():
            for p in (*self.parameters, *self.foreign, *self.own):
                before_it, after_it = tensors.hook_tables(p)
                if after_it or (before_it and id(p) not in shared):
                    raise hooked(p, SEES, "register_post_accumulate_grad_hook" if after_it else "register_hook")
        roots = list(self.place.roots)
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            yield 1.0
            brought = [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad
        self._sum(brought, roots)

    @torch.no_grad()
    def _sum(self, brought: list[torch.Tensor | None], roots: list[torch.Tensor]) -> None:
        failed = float(self.place.failures.found is not None)
        used = [float(grad is not None) for grad in brought]
        marks = torch.cat([self._loss(roots), torch.tensor([failed, *used], device=self.device)])
        with advising():
            dist.all_reduce(marks)
        *losses, failed = marks[: self.place.ranks + 1].tolist()
        if failed:
            self.place.failures.agree()
        _compare(losses)
        for p, grad, some in zip(self.parameters, brought, marks[self.place.ranks + 1 :].tolist(), strict=True):
            if some:
                summed = _dense(grad, p)
                dist.all_reduce(summed)
                _add(p, summed)

    def _loss(self, roots: list[torch.Tensor]) -> torch.Tensor:
        """In this rank's place among those of all."""
        sums = [root.detach().sum(dtype=torch.float32) for root in roots if root.is_floating_point()]
        losses = torch.zeros(self.place.ranks, device=self.device)
        if sums:
            losses[self.rank] = sum(sums[1:], sums[0])
        return losses


def _compare(losses: list[float]) -> None:
    """Every rank computes the loss: the same one, or something is wrong."""
    if all(map(math.isnan, losses)):  # the user's own
        return
    if any(not math.isclose(loss, losses[0], rel_tol=1e-3, abs_tol=1e-6) for loss in losses):
        raise NotSupported(DIFFERENT.format(losses=", ".join(f"{loss:.6g}" for loss in losses)))


def _dense(grad: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """A copy. gloo does not know bfloat16 everywhere, and sums of halves lose digits."""
    dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
    if grad is None:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _add(p: torch.Tensor, grad: torch.Tensor) -> None:
    grad = grad.to(p.dtype)
    if p.grad is None:
        p.grad = grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
    elif p.grad.is_sparse:
        p.grad = p.grad.to_dense() + grad
    else:
        p.grad.add_(grad)
