"""Reduces gradients to their owners, by FairScale's own reductions, in a fixed order and for each backward.

FairScale counts on a forward of its wrapper before every backward, on gradients that arrive in the same order on all
ranks, and on a parameter being used by all of them or by none; and it divides once more what it has averaged already,
if a loop adds up over several backwards. None of this is said when it goes wrong. So its hooks are taken off, and its
reductions are called from here: those of all parameters, one after the other, while the backward goes on as far as
gradients are there. What nobody has used keeps the gradient that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine, fairscale, tensors
from nbtrain.compat.layers import NormLayer
from nbtrain.strategies.kit.gradient_average import TOO_EARLY, TWICE
from nbtrain.strategies.kit.owned_tensors import GradientStandIn
from nbtrain.strategies.kit.running_statistics import launch_statistics
from nbtrain.strategies.kit.written_numbers import found_gradients

REDUCED = "nbtrain_reduced"
"""the attribute of a gradient that is averaged, and of what stands for one: the rank that has it; it goes where the
gradient goes"""
READ = (
    "a gradient was looked at or edited (p.grad, or by a GradScaler of one's own), and under sharded one rank has it "
    "and the others have not: write `with whole(model, gradients=True): …` around it, between loss.backward() and "
    "optimizer.step(); clip_grad_norm_ returns their norm, and --precision 16-mixed scales losses"
)
MOVED = (
    "the gradient of one weight was given to another (p.grad = q.grad), and under sharded other ranks have them: write "
    "`with whole(model, gradients=True): …` around it, between loss.backward() and optimizer.step()"
)
FLAT = (
    "p.grad is a part of a larger tensor (a flat buffer), and under sharded a gradient ends on the one rank that steps "
    "its weight, so that the buffer would have parts of it only: leave p.grad to loss.backward(), or take --strategy "
    "zero1"
)


class GradientElsewhere(GradientStandIn):
    """Stands in the place of a gradient that only its owner has."""

    text = "a gradient that another rank has"
    refusal = READ

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == tensors.ZERO_MANY:
            with tensors.as_plain_tensors():
                return func([gradient for gradient in args[0] if not isinstance(gradient, cls)])
        return super().asked(func, name, args, kwargs)


class ReduceToOwner:
    """Reduces the gradients of one ShardedDataParallel to their owners."""

    def __init__(
        self, parallel: Any, parameters: list[torch.Tensor], owners: dict[int, int], norms: list[NormLayer]
    ) -> None:
        self.parallel, self.parameters, self.owners = parallel, parameters, owners
        self.norms = norms
        self.rank = dist.get_rank()
        self.on = True
        self.held: dict[int, torch.Tensor] = {}
        """averaged gradients of backwards before the one under way"""
        self.pending: set[int] = set()
        """ids of parameters whose gradients arrived while `on` was not set"""
        self.held_back = False
        """there was a backward without `on` since the last one that was communicated"""
        self.order: list[torch.Tensor] = []
        self.left: list[torch.Tensor] = []
        """those whose gradients were another rank's when the last cell ended"""
        self.late: list[torch.Tensor] = []
        """frozen while their gradients were held back: FairScale does not send them any more"""
        self.inside = False
        """a backward is under way"""
        self._handles: list[Any] = []
        self.build()

    def build(self) -> None:
        """Hang hooks on the parameters; again when some were frozen or thawed. Not collective."""
        self.requires = [p.requires_grad for p in self.parameters]
        for handle in self._handles:
            handle.remove()
        sent = {id(p) for p in (*self.order, *self.late)} if self.held_back else set()
        self.late = [p for p in self.parameters if id(p) in sent and not p.requires_grad]
        self.order = [p for p in reversed(self.parameters) if p.requires_grad]  # about the order of arrival
        self.reduce = fairscale.refresh(self.parallel)
        for p in self.order:
            if tensors.hook_table(p, tensors.ACCUMULATED_HOOKS):
                raise NotSupported(TOO_EARLY)
        self._handles = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.order]
        self.forget()

    def forget(self) -> None:
        self.got: set[int] = set()
        self.sent = 0
        self.armed = False
        fairscale.forget(self.parallel)

    # -- around a backward ---------------------------------------------------------------

    @contextmanager
    def backward(self, sync: bool) -> Iterator[None]:
        """Set aside what is averaged; it is added when the new gradients are whole, too, and no longer scaled."""
        if self.inside:  # of another one: layers that are recomputed
            yield
            return
        if [p.requires_grad for p in self.parameters] != self.requires:
            self.build()
        self.before: set[int] = set()
        self.had = [p.grad is not None for p in self.parameters]
        for p in self.parameters:
            grad = p.grad
            there = getattr(grad, REDUCED, None)
            if there is not None and there != self.owners[id(p)]:
                raise NotSupported(MOVED)
            if isinstance(grad, GradientElsewhere):
                self.before.add(id(p))
                p.grad = None
            elif grad is not None and there is not None:
                old = self.held.get(id(p))
                self.held[id(p)] = grad if old is None else grad.add_(old)
                p.grad = None
            elif grad is not None and id(p) not in self.pending and tensors.shown_by(grad).numel() > grad.numel():
                raise NotSupported(FLAT)
        self.used: set[int] = set()
        self.inside, self.on = True, sync
        self.held_back = self.held_back or not sync
        try:
            yield
        finally:
            self.inside, self.on = False, True
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        for p in self.parameters:
            key = id(p)
            mine = self.owners[key] == self.rank
            if p.grad is not None and key not in self.used:  # this rank's own, to be added up further
                continue
            old = self.held.pop(key, None)
            if mine and key in self.used and p.grad is not None:
                if old is not None:  # the loop may hold it
                    p.grad = old.add_(p.grad)
                setattr(p.grad, REDUCED, self.rank)
            elif mine and old is not None and p.grad is None:
                p.grad = old
            elif not mine and p.grad is None and (key in self.used or key in self.before):
                self._stand_in(p)

    def _stand_in(self, p: torch.Tensor) -> None:
        p.grad = GradientElsewhere.of(p)
        setattr(p.grad, REDUCED, self.owners[id(p)])

    def _arrived(self, p: torch.Tensor) -> None:
        if p.grad is not None and p.grad.is_sparse:
            raise NotSupported("a sparse gradient cannot be reduced by FairScale: --strategy zero1 or ddp takes it")
        if not self.on:
            self.pending.add(id(p))
            return
        if not self.armed:
            self.armed = True
            fairscale.begin(self.parallel)
            autograd_engine.after_backward(self._finish)  # before a loss scaler looks at what there is
        if id(p) in self.got and any(other is p for other in self.order[: self.sent]):
            raise NotSupported(TWICE)
        self.got.add(id(p))
        while self.sent < len(self.order) and id(self.order[self.sent]) in self.got:
            self._send()

    def _send(self) -> None:
        p = self.order[self.sent]
        self.sent += 1
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        self.reduce[id(p)]()

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            if not self.held_back:  # else they may be this rank's own
                found_gradients(self.had, usual=False)
            used = self.got | self.pending
            order = [*self.order, *self.late]
            marks = torch.tensor([float(id(p) in used) for p in order], device=order[0].device)
            while self.sent < len(self.order):
                self._send()
            work = dist.all_reduce(marks, op=dist.ReduceOp.MAX, async_op=True)
            take_statistics = launch_statistics(self.norms)
            fairscale.finish(self.parallel)
            for p in self.late:
                self._reduce(p, torch.zeros_like(p) if p.grad is None else p.grad)
            work.wait()
            for p, mark in zip(order, marks.tolist(), strict=True):
                if mark:
                    self.used.add(id(p))
                else:  # as if it had never been sent
                    p.grad = None
            take_statistics()
            self.pending.clear()
            self.held_back, self.late = False, []
        finally:
            self.forget()

    # -- before a step -------------------------------------------------------------------

    @torch.no_grad()
    def catch_up(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce gradients that came from `torch.autograd.grad`, or by hand on every rank."""
        for p in parameters:
            grad, key = p.grad, id(p)
            if key not in self.owners or grad is None:
                continue
            if (there := getattr(grad, REDUCED, None)) is not None:
                if there != self.owners[key]:
                    raise NotSupported(MOVED)
                continue
            self._reduce(p, grad)
            if p.grad is not None:
                setattr(p.grad, REDUCED, self.rank)
                if (old := self.held.pop(key, None)) is not None:
                    p.grad.add_(old)
            else:
                self._stand_in(p)

    def _reduce(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Reduce one gradient by itself: its owner gets the average, the others None."""
        sent = grad.detach().clone(memory_format=torch.contiguous_format).div_(dist.get_world_size())
        dist.reduce(sent, self.owners[id(p)])
        p.grad = torch.empty_like(p).copy_(sent) if self.owners[id(p)] == self.rank else None

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """While a backward begins: multiply what is set aside."""
        for p in parameters:
            if (old := self.held.get(id(p))) is not None:
                old.mul_(factor)

    def enter(self) -> None:
        """A cell begins: gradients that the one before has left wait on their owners, and are looked for in a step."""
        while self.left:
            self._stand_in(self.left.pop())

    def leave(self) -> None:
        """Take our stand-ins off the parameters between cells."""
        self.left = [p for p in self.parameters if isinstance(p.grad, GradientElsewhere)]
        for p in self.left:
            p.grad = None
        self.held.clear()
        self.forget()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
