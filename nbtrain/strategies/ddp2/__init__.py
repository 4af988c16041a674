"""`ddp2`: ddp from node to node, and within a node every batch is cut over its ranks.

All ranks of a node see the same batch. Each computes a part of it, and what the model returns is gathered, so that the
loop goes on with the outputs for the node's whole batch (a softmax over it, a contrastive loss). A gradient that comes
back is the same on every rank of the node; each takes the rows of its own part, times the number of ranks, so that the
average over all ranks is the sum within a node and the average over nodes. What is used outside of such calls (methods
of the model's own, weights in the loss) is computed by each rank in full: its average is right as it is.

A model that cannot be called in parts is called with whole batches, by every rank (`CutPlan` in kit/split_batch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RankInfo
from nbtrain.compat import layers
from nbtrain.strategies.base import Component, Facts, HoldsModules, Prepared, Strategy
from nbtrain.strategies.ddp2.call_agreement import Agreed, ComputedPart, agree
from nbtrain.strategies.kit.batch_structure import cut, flatten
from nbtrain.strategies.kit.collective_calls import MESH
from nbtrain.strategies.kit.gradient_buckets import AllReduce, AllReduceOptions
from nbtrain.strategies.kit.profile_arithmetic import Sent, divided, estimate, output, replicated, ring, width_sent
from nbtrain.strategies.kit.random_draws import OwnRandom, captured
from nbtrain.strategies.kit.replicated import Replicated
from nbtrain.strategies.kit.split_batch import CutCall, CutCalls
from nbtrain.strategies.kit.units_to_wrap import called_by_loops
from nbtrain.strategies.memory_estimate import Estimate, Profile, World


class _GatheredParts(torch.autograd.Function):
    """Concatenates the parts of a node's ranks."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, rows: list[int], index: int, group: Any) -> torch.Tensor:
        ctx.start, ctx.rows, ctx.count = sum(rows[:index]), rows[index], len(rows)
        shape = mine.shape[1:]
        row = shape.numel() * mine.element_size()
        sent = mine.new_zeros((max(rows), *shape))
        sent[: rows[index]] = mine
        flat = sent.view(-1).view(torch.uint8)  # whatever the backend knows of the type
        parts = [torch.empty_like(flat) for _ in rows]
        dist.all_gather(parts, flat, group=group)
        rows_of_ranks = [part[: n * row].view(mine.dtype).view(n, *shape) for part, n in zip(parts, rows, strict=True)]
        return torch.cat(rows_of_ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotSupported(
                "a gradient of a gradient (create_graph=True) cannot be taken through a model under ddp2: this rank "
                "has the gradient of its part only. --strategy dp and --strategy ddp can"
            )
        return grad.narrow(0, ctx.start, ctx.rows) * ctx.count, None, None, None


class PreparedDDP2(Replicated, HoldsModules):
    """A component whose models are called in parts by the ranks of a node."""

    def __init__(
        self, component: Component, bucket_mb: float, all_reduce: AllReduce, place: RankInfo, group: Any
    ) -> None:
        super().__init__(component, bucket_mb, all_reduce)
        self.place = place
        self.group = group
        self.count = place.world_size // place.nodes
        self.random_state = OwnRandom(place.local_rank + 1)  # 0 would draw from the one that stays equal on all
        self.drew = False
        """a model has drawn random numbers in this cell"""
        self.calls = CutCalls("ddp2", self.count, self._run, place.device.startswith("cuda"))
        self.notes.append(f"each batch is cut over the {self.count} ranks of {'a' if place.nodes > 1 else 'the'} node")

    def enter(self) -> None:
        super().enter()
        self.random_state.begin()
        self.drew = False
        models = self.component.modules.values()
        self.calls.on([*models, *called_by_loops(models)])

    def leave(self, pause: bool = False) -> None:
        self.calls.off()
        super().leave(pause)

    def release_modules(self) -> Callable[[], Prepared]:
        return self.calls.release_modules(self)

    def _run(self, call: CutCall) -> Any:
        """Every rank of every node comes here, and all decide alike."""
        plan, index = call.plan, self.place.local_rank
        # A gradient with respect to the batch has to be whole on every rank.
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)
        if plan.reason or differentiated or len(call.sizes) < self.count:
            agree(ComputedPart(), self.place, call)
            return call.plain()
        args, kwargs = call.form.rebuild(cut(call.tensors, call.batch, call.sizes)[index])
        with self.random_state():
            before = captured()
            returned = layers.call_as_torch_does(call.module, *args, **kwargs)
            drew = any(not torch.equal(state, other) for state, other in zip(before, captured(), strict=True))
        tensors, form = flatten(returned)
        agreed: Agreed | None
        agreed, drew = agree(ComputedPart(plan, form.key, tensors, call.sizes[index], drew), self.place, call)
        if drew and not self.drew:
            self.drew = True
            torch.rand(1)  # on every rank, whichever drew: so the next cell begins elsewhere, and draws others
        if agreed is None:
            self.calls.give_up(call)
            return call.plain()
        outputs = [
            tensor if rows is None else _GatheredParts.apply(tensor, rows, index, self.group)
            for tensor, rows in zip(tensors, agreed, strict=True)
        ]
        return form.rebuild(outputs)


class DDP2(Strategy):
    """Data parallel training in which the ranks of a node compute each batch together."""

    facts = Facts(batch_per="node")

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options(AllReduceOptions):
        """How gradients travel."""

    _made: tuple[Any, Any] | None = None
    """(the group of all ranks, the group of this node's)"""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        travels = width_sent(self.options.comm_dtype, world)
        parts = world.ranks // world.nodes
        if parts == 1:
            return replicated(profile, world, self.options.bucket_mb, travels)
        sent = Sent(profile, world, self.options.bucket_mb, travels)
        return estimate(
            profile,
            world,
            travelling=sent.travelling,
            activations=divided(profile, parts),
            sent=sent.bytes + ring(output(profile), parts) * world.accumulate,
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):
            return Prepared(component)
        all_reduce = AllReduce(self.options.comm_dtype)
        if self.place.world_size == self.place.nodes:  # one rank in each: that is ddp
            return Replicated(component, self.options.bucket_mb, all_reduce)
        return PreparedDDP2(component, self.options.bucket_mb, all_reduce, self.place, self._group())

    def _group(self) -> Any:
        """The group of this node's ranks. Collective when the group of all ranks is a new one."""
        if self.place.nodes == 1:
            return None
        if self._made is None or self._made[0] is not dist.group.WORLD:
            count = self.place.world_size // self.place.nodes
            mine = None
            for node in range(self.place.nodes):
                ranks = list(range(node * count, (node + 1) * count))
                group = dist.new_group(ranks, group_desc=f"{MESH}_node")
                mine = group if node == self.place.node else mine
            self._made = dist.group.WORLD, mine
        return self._made[1]
