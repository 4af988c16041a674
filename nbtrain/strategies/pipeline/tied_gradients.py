"""Gradients of parameters that every rank has whole: those of several stages (tied weights), and the root's own.

What a stage or a part does with one is done by its owner alone; what happens outside of them (a loss term over the
parameters, the root's own parameter in a forward that runs part by part) is done by every rank, and counts on the
first. So the sum over the ranks is what one process has. It is taken once, at the end of a backward, over what that
backward has brought.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_messages import advising

DIRECT = (
    "a parameter was used directly (F.linear(h, model.embed.weight), or a loss term over model.parameters()), which "
    "under pipeline only one rank has: its number is NaN on the others. Call the module that holds it, use the "
    "optimizer's weight_decay for a term over all of them, or take --strategy ddp"
)

DIFFERENT = (
    "the ranks start backwards from different losses ({losses}{why}): under pipeline all ranks see the same batches "
    "and compute one and the same loss. Let nothing in the loop depend on the rank, and draw random numbers from "
    "torch's own stream, which is the same on all ranks; or take --strategy ddp, where each rank has its own loss"
)
NAN = "; NaN is also what a parameter of another stage shows where it is used directly, and not by its module"
HOOKED = (
    "a parameter has a {which}, which under pipeline would see the gradient of one "
    "micro-batch, and that on one rank: work on the gradients between loss.backward() and optimizer.step(), or use "
    "--strategy ddp"
)


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
            if any(tensors.hook_tables(p)[1] for p in (*self.parameters, *self.foreign, *self.own)):
                raise NotSupported(HOOKED.format(which="register_post_accumulate_grad_hook"))
            if any(tensors.hook_tables(p)[0] for p in (*self.foreign, *self.own) if id(p) not in shared):
                raise NotSupported(HOOKED.format(which="hook on its gradient (register_hook)"))
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
        buffers = self._buffers(brought, self._loss(roots))
        for _, buffer, _ in buffers:
            _together(buffer)
        (_, _, first), *_ = buffers
        losses, used, (failed,) = (part.tolist() for part in first[-3:])
        if failed:
            self.place.failures.agree()
        self._compare(losses, roots)
        for places, _, views in buffers:
            for place, view, some in zip(places, views, used, strict=False):
                if some:
                    _add(self.parameters[place], view)
            used = used[len(places) :]

    def _loss(self, roots: list[torch.Tensor]) -> torch.Tensor:
        """In this rank's place among those of all."""
        sums = [root.detach().sum(dtype=torch.float32) for root in roots if root.is_floating_point()]
        losses = torch.zeros(dist.get_world_size(), device=self.device)
        if sums:
            losses[self.rank] = sum(sums[1:], sums[0])
        return losses

    def _compare(self, losses: list[float], roots: list[torch.Tensor]) -> None:
        """Every rank computes the loss: the same one, or something is wrong."""
        nans = sum(map(math.isnan, losses))
        if nans:
            reached = torch.tensor([float(_reaches(roots, {id(p) for p in self.foreign}))], device=self.device)
            _together(reached)
            if reached.item():
                raise NotSupported(DIRECT)
            if nans == len(losses):  # the user's own
                return
        if any(not math.isclose(loss, losses[0], rel_tol=1e-3, abs_tol=1e-6) for loss in losses):
            why = NAN if nans else ""
            raise NotSupported(DIFFERENT.format(losses=", ".join(f"{loss:.6g}" for loss in losses), why=why))

    def _buffers(self, brought: list[torch.Tensor | None], losses: torch.Tensor) -> list[Any]:
        """(places, what is sent, what it holds), by type and device; losses and marks go with the first."""
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, p in enumerate(self.parameters):
            groups.setdefault((_sent_as(p.dtype), p.device), []).append(place)
        used = [float(brought[place] is not None) for group in groups.values() for place in group]
        if not any(dtype.is_floating_point for dtype, _ in list(groups)[:1]):
            groups = {(torch.float32, self.device): [], **groups}
        buffers = []
        for number, ((dtype, device), places) in enumerate(groups.items()):
            held = [_dense(brought[place], self.parameters[place], dtype) for place in places]
            if not number:
                marks = used, [float(self.place.failures.found is not None)]
                held += [losses.to(device, dtype), *(torch.tensor(m, dtype=dtype, device=device) for m in marks)]
            flat = tensors.flatten(held)
            buffers.append((places, flat, tensors.unflatten(flat, held)))
        return buffers


def _together(buffer: torch.Tensor) -> None:
    with advising():
        dist.all_reduce(buffer)


def _dense(grad: torch.Tensor | None, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if grad is None:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    return (grad.to_dense() if grad.is_sparse else grad).to(dtype)


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    """gloo does not know bfloat16 everywhere, and sums of halves lose digits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _add(p: torch.Tensor, grad: torch.Tensor) -> None:
    grad = grad.to(p.dtype)
    if p.grad is None:
        p.grad = grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
    elif p.grad.is_sparse:
        p.grad = p.grad.to_dense() + grad
    else:
        p.grad.add_(grad)


def _reaches(roots: list[torch.Tensor], parameters: set[int]) -> bool:
    """Whether the graph of these ends in one of the parameters. Looked at only where something is not a number."""
    if any(id(root) in parameters for root in roots):
        return True
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if id(getattr(node, "variable", None)) in parameters:
            return True
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        todo += following
    return False
