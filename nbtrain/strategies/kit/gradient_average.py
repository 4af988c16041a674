"""Averages gradients over the ranks at the end of every backward, without wrapping the model.

Hooks on the parameters fill buckets in a fixed order; a full bucket is sent while the backward goes on. Averaging is
idempotent (what is averaged already stays what it is), so several backwards before a step, two forwards, own methods
and gradient penalties are right without anybody being told about them. Each bucket carries one flag per parameter that
says whether a rank used it: what nobody used keeps the gradient it had (None, mostly), exactly as in one process, and
needs no collective of its own. After `loss.backward(create_graph=True)` the averages can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, eq
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine, tensors
from nbtrain.compat.layers import NormLayer
from nbtrain.strategies.kit.collective_calls import subject
from nbtrain.strategies.kit.gradient_buckets import AllReduce, Bucket, in_buckets
from nbtrain.strategies.kit.gradient_graphs import GradientGraphs, means_of, of_means
from nbtrain.strategies.kit.running_statistics import launch_statistics
from nbtrain.strategies.kit.written_numbers import found_gradients

TRAINABLE = attrgetter("requires_grad")
TOO_EARLY = (
    "a parameter has a register_post_accumulate_grad_hook, which sees this rank's gradient before it is averaged: "
    "write what it does between loss.backward() and optimizer.step(): `with whole(model, gradients=True): …`"
)

TWICE = (
    "a weight got another gradient in a backward when its first had been sent to the other ranks: a reentrant "
    "checkpoint is a backward of its own, and this weight is used outside of it, or in several. Write "
    "`checkpoint(..., use_reentrant=False)`"
)


open_averages: list[GradientAverage] = []
"""Those that are not closed, in the same order on all ranks."""


class GradientAverage:
    """Averages the gradients of one component. Lives until `close`."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        bucket_mb: float = 25,
        norms: Iterable[NormLayer] = (),
        all_reduce: AllReduce | None = None,
    ) -> None:
        """`norms`: their running statistics are averaged, too, so that all ranks evaluate the same model."""
        self.all_reduce = all_reduce or AllReduce()
        self.parameters = list(parameters)
        self.norms = list(norms)
        self.subject = 0
        """what its collectives are for"""
        self.ids = frozenset(map(id, self.parameters))
        self.capacity = int(bucket_mb * 2**20)
        self.on = True
        self.had: list[bool] = []
        """which parameters had a gradient when the backward began, which adds to it; empty: none had"""
        self.graphs = False
        """gradients were averaged with their graphs: a backward through them averages in its middle, and nothing else
        is sent before its end, so that collectives pair up"""
        self.handles: dict[int, Any] = {}
        self.pending: set[int] = set()  # arrived while `on` was not
        self.held_back = False  # a backward without `on` has been since the last that was communicated
        self.averaged: dict[int, ref[torch.Tensor]] = {}
        """id of a parameter → its gradient, averaged since the last step: any other one is the rank's own"""
        self.asked: dict[int, int] = {}
        """id of a parameter → how often its gradient was written to when `torch.autograd.grad` was asked for another"""
        self.where: dict[int, int] = {}
        self.spent: set[int]  # stepped while the backward goes on, by a hook
        self.under_way: list[tuple[Bucket, Callable[[], torch.Tensor], bool]] = []
        self.build()
        self.step_handle = register_optimizer_step_pre_hook(self.before_step)
        open_averages.append(self)

    def build(self) -> None:
        """Deal the trainable parameters out to buckets; again when some were frozen or thawed. One that was frozen
        while its gradient was held back takes part once more."""
        self.trainable = [p.requires_grad for p in self.parameters]
        late = self.where if self.held_back else {}
        dealt = [p for p in self.parameters if p.requires_grad or id(p) in late]
        self.stale = not all(map(TRAINABLE, dealt))
        for p in reversed(dealt):
            if id(p) not in self.handles:
                if tensors.hook_tables(p)[1]:
                    raise NotSupported(TOO_EARLY)
                self.handles[id(p)] = p.register_post_accumulate_grad_hook(self.arrived)
        groups = in_buckets(dealt, self.capacity, lambda p: p.numel() * p.element_size(), lambda p: (p.dtype, p.device))
        self.buckets = [Bucket(group) for group in groups]
        self.where = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self.reset()

    def backward(self, sync: bool = True) -> AbstractContextManager[float]:
        """A backward begins: decide which parameters take part, so that thawed ones are averaged by its end. Returns
        what it runs in."""
        if not self.armed:
            if self.stale or not all(map(eq, map(TRAINABLE, self.parameters), self.trainable)):
                self.build()
            had = [p.grad is not None for p in self.parameters]
            self.had = had if True in had else []
        if not sync:
            self.on, self.held_back = False, True
        return self

    def __enter__(self) -> float:
        return 1.0

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.on = True
        if kind is not None:
            self.reset()

    def reset(self) -> None:
        """Forget a backward under way: at its end, or because it raised."""
        self.all_reduce.forget()
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        self.got: set[int] = set()
        self.spent = set()
        self.under_way = []
        self.armed = False
        self.again = False
        """the backward under way was given `create_graph=True`"""

    def arrived(self, p: torch.Tensor) -> None:
        """The hook on a parameter: autograd has put a gradient into `p.grad`."""
        key = id(p)
        self.averaged.pop(key, None)
        if not self.armed:
            if not self.on:
                self.pending.add(key)
                return
            self.armed = True
            if torch.is_grad_enabled():
                self.again = self.graphs = True
            autograd_engine.after_backward(self.finish)
        got = self.got
        index = self.where.get(key)
        if index is None:
            return
        if key in got:
            if index < len(self.under_way):
                raise NotSupported(TWICE)
            return
        got.add(key)
        self.missing[index] -= 1
        if self.missing[index] or self.graphs:
            return
        # In this order on every rank, whatever order the gradients came in: collectives must pair up.
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            self.launch()

    @torch.no_grad()
    def launch(self) -> None:
        """Send the next bucket."""
        bucket = self.buckets[len(self.under_way)]
        used = self.got | self.pending if self.pending else self.got
        grads: list[Any] = [p.grad for p in bucket.parameters]
        complete = bucket.ids <= used and not any(g is None or g.is_sparse for g in grads)
        flags = bucket.all_used
        if not complete:
            marks = [id(p) in used for p in bucket.parameters]
            sparse = [g is not None and g.is_sparse for g in grads]
            flags = flags.new_tensor([*map(float, marks), *map(float, sparse)])
            grads = [
                p.new_zeros(p.shape) if g is None or g.is_sparse else g
                for p, g in zip(bucket.parameters, grads, strict=True)
            ]
        subject[0] = self.subject
        try:
            self.under_way.append((bucket, self.all_reduce.average([*grads, flags]), complete))
        finally:
            subject[0] = 0

    @torch.no_grad()
    def finish(self) -> None:
        """The backward has ended: send what this rank did not use, wait, hand the gradients out."""
        try:
            if self.had and not self.held_back:  # else they may be this rank's own
                found_gradients(self.had, usual=False)
            graphs = GradientGraphs(self.where, self.parameters) if self.again else None
            while len(self.under_way) < len(self.buckets):
                self.launch()
            take_statistics = launch_statistics(self.norms)
            for bucket, wait, whole in self.under_way:
                self.hand_out(bucket, wait(), whole)
            take_statistics()
            if graphs is not None:
                self.averaged |= graphs.attach(self.all_reduce.average)
        finally:
            self.pending.clear()
            self.held_back = False
            self.reset()

    def hand_out(self, bucket: Bucket, flat: torch.Tensor, complete: bool) -> None:
        views = tensors.unflatten(flat, bucket.shapes)
        # No need to look at the flags, and no wait for the device. A gradient that was there before stays that object,
        # as in one process: the loop may hold it.
        if complete and bucket.contiguous and not self.spent and not self.had:
            for p, g in zip(bucket.parameters, views, strict=False):
                p.grad = g
            self.averaged.update(zip(bucket.keys, map(ref, views), strict=False))
            return
        count = len(bucket.parameters)
        used, sparse = [True] * count, [False] * count
        if not complete:
            tail = views[-1]
            flags = (tail.real if tail.is_complex() else tail).gt(0).tolist()
            used, sparse = flags[:count], flags[count:]
        for p, g, some, thin in zip(bucket.parameters, views, used, sparse, strict=False):
            if not some or id(p) in self.spent:
                continue
            if thin:
                if p.grad is None:  # not used here, but elsewhere: this rank must take part
                    indices = torch.empty(1, 0, dtype=torch.int64, device=p.device)
                    p.grad = torch.sparse_coo_tensor(indices, p.new_empty(0, *p.shape[1:]), p.shape)
                self.average(p)
            elif p.grad is None:
                p.grad = torch.empty_like(p).copy_(g)
            else:
                p.grad.copy_(g)
            self.averaged[id(p)] = ref(p.grad)

    @torch.no_grad()
    def average(self, p: torch.Tensor) -> None:
        """Average one gradient by itself."""
        grad = p.grad
        assert grad is not None
        if not grad.is_sparse:
            grad.copy_(self.all_reduce.average([grad.detach()])().view(grad.shape))
        elif dist.get_backend() == "gloo" and not grad.is_cuda:
            thin = grad.coalesce()
            dist.all_reduce(thin)
            p.grad = thin / dist.get_world_size()
        else:  # NCCL has no sparse tensors
            dense = grad.to_dense()
            dist.all_reduce(dense)
            p.grad = dense.div_(dist.get_world_size()).to_sparse(grad.sparse_dim())
        assert p.grad is not None
        self.averaged[id(p)] = ref(p.grad)

    def catch_up(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average gradients that came from `torch.autograd.grad`, or by hand. What is averaged already stays what it
        is, also where it has been edited."""
        for p in parameters:
            if (grad := p.grad) is None or (key := id(p)) not in self.ids:
                continue
            before = self.averaged.get(key)
            added_to = self.asked and self.asked.get(key, tensors.version(grad)) != tensors.version(grad)
            if before is None or before() is not grad or added_to:
                self.average(p)
            self.asked.pop(key, None)

    def differentiated(self, outputs: Iterable[Any], inputs: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        """`torch.autograd.grad` gave this rank's own gradients of these. Where a loop adds them to `p.grad` in place,
        that is the rank's own, too. Those of averaged gradients are averaged. Returns what it gives."""
        if self.graphs and any(map(of_means, outputs)):
            return means_of(self.all_reduce.average, [id(p) in self.ids for p in inputs], inputs, gradients)
        for p in inputs:
            if id(p) in self.averaged and p.grad is not None:
                self.asked[id(p)] = tensors.version(p.grad)
        return gradients

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = set(map(id, parameters))
        if self.ids.isdisjoint(keys):
            return
        found_gradients([p.grad is not None for p in parameters], usual=True)
        self.catch_up(parameters)
        for key in keys:
            self.averaged.pop(key, None)
        if self.armed:
            self.spent |= keys

    def close(self) -> None:
        for handle in (*self.handles.values(), self.step_handle):
            handle.remove()
        self.handles.clear()
        open_averages[:] = [average for average in open_averages if average is not self]
