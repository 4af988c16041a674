"""One call of a model: its micro-batches go through the stages, and what the last returns goes to every rank.

First all forwards, then all backwards, as GPipe does: the loss is made of the whole output, by the loop. For autograd
the whole call is one node, whose backward runs the stages the other way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import autograd_engine, pytree
from nbtrain.errors import NotSupported
from nbtrain.strategies.pipeline.autograd_calls import AGAIN
from nbtrain.strategies.pipeline.by_parts import ALONE
from nbtrain.strategies.pipeline.forward_program import Program
from nbtrain.strategies.pipeline.micro_batches import Cut, Joined, gradients, join
from nbtrain.strategies.pipeline.stage import Stage, StagePlace, Stretch
from nbtrain.strategies.pipeline.stage_errors import StageFailure
from nbtrain.strategies.pipeline.stage_messages import Packed, packed

APART = (
    "the ranks have called {name} with different batches: under pipeline every rank is to see the same ones. Let "
    "nothing of a batch depend on the rank, and let no rank draw random numbers alone, from which the loader's next "
    "order comes (below `if rank == 0:` write `with torch.random.fork_rng():` around it); or use --strategy ddp"
)

OTHER_PLANS = (
    "the forward of {name} does not do the same on every rank: something that it reads (a global, an attribute, a "
    "file, `rank`), or a hook in it, differs between them, and under pipeline each rank computes a part of one "
    "forward. Let nothing in a forward depend on the rank, or use --strategy ddp"
)


class MicroBatchFlow:
    """Made for each call. The same on every rank, but for what it keeps."""

    def __init__(
        self,
        place: StagePlace,
        programs: list[Program],
        leaves: list[Any],
        slices: list[list[Any]],
        cut: Cut,
        name: str,
    ) -> None:
        """`programs`: of each micro-batch. `leaves`: what the model is given; `slices`: the micro-batches of it."""
        self.place, self.programs, self.cut, self.name = place, programs, cut, name
        self.leaves, self.slices = leaves, slices
        self.stretches: list[Stretch | None] = []
        self.joined: Joined | None = None
        self.stages: list[Stage] = []
        self.failed: Callable[[], None] = lambda: None
        """called before a failure of a stage is raised"""
        kind = place.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def autocast_of_call(self) -> AbstractContextManager[Any]:
        """What the model was called in, for what computes later."""
        kind, dtype, enabled = self.autocast
        return torch.autocast(kind, dtype=dtype, enabled=enabled)

    # --- forward -------------------------------------------------------------------------------

    def prepare(self, graph: bool) -> None:
        """Collective."""
        meet(self.place, self.leaves, self.name, plan_of(self.programs))
        self.stages = [Stage(self.place, program, graph) for program in self.programs]

    def forward(self, graph: bool) -> Joined:
        place = self.place
        self.prepare(graph)
        results = []
        for stage, given in zip(self.stages, self.slices, strict=True):
            stretch, result = stage.forward(given)
            self.stretches.append(stretch if graph else None)
            results.append(result)
        said: Any = place.failures.found
        message: Packed | None = None
        if place.rank == place.last and said is None:
            try:
                found = join(results, self.cut, self.name)
                said = found.output, found.differ
                message = packed(said)
            except NotSupported as error:  # the others wait for what is shared
                said = place.failures.take(error)
        place.channel.settle()
        said = self.agreed(place.channel.share(said, place.last, message))
        self.joined = joined = Joined(*said)
        return joined

    def agreed(self, said: Any) -> Any:
        """What all ranks were told, if no stage has failed."""
        if isinstance(said, StageFailure):
            self.failed()
            self.place.failures.fail(said)
        return said

    # --- backward ------------------------------------------------------------------------------

    def backward(self, grads: list[Any], wanted: list[bool], again: bool) -> list[Any]:
        """`grads`: of the tensors it returned. `wanted`: for each tensor that it was given, whether its gradient is."""
        place, joined = self.place, self.joined
        assert joined is not None
        meet(place, [], self.name)
        sliced = gradients(grads, self.cut)
        kept: list[Stretch] = []
        for i, stretch in enumerate(self.stretches):
            assert stretch is not None
            self.stages[i].backward(stretch, sliced[i] if place.rank == place.last else None, again)
            if not again:
                stretch.ends = []
            kept.append(stretch)
        place.channel.settle()
        found = self._of_inputs(kept, wanted)
        if not place.accumulates():  # no backward of all parameters follows, where ranks would hear of a failure
            meet(place, [], self.name)
        return found

    def _of_inputs(self, stretches: list[Stretch], wanted: list[bool]) -> list[Any]:
        """What all stages have made of the gradients of what the model was given."""
        found: list[Any] = []
        tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        for i, wants in zip(tensors, wanted, strict=True):
            if not wants:
                found.append(None)
                continue
            leaf = self.leaves[i]
            parts = []
            for given, stretch in zip(self.slices, stretches, strict=True):
                box = stretch.inputs[i]
                grad = box.grad if box is not None else None
                parts.append(torch.zeros_like(given[i]) if grad is None else grad)
                if box is not None:
                    box.grad = None
            total = torch.cat(parts) if self.cut.cuts(leaf) else sum(parts[1:], parts[0])
            total = total.detach().contiguous().clone()
            dist.all_reduce(total)
            found.append(total)
        return found


def plan_of(programs: list[Program]) -> int:
    return zlib.crc32(repr([program.number for program in programs]).encode()) if programs else 0


def meet(place: StagePlace, leaves: list[Any], name: str, plan: int = 0) -> None:
    """All ranks are here, with the same batch and the same plan: who waits for another stage afterwards does not wait
    in vain."""
    number = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            number = zlib.crc32(repr((tuple(leaf.shape), leaf.dtype)).encode(), number)
            if leaf.device.type == "cpu" and leaf.numel() and leaf.layout is torch.strided:
                part = leaf.detach().reshape(-1)[: 1 << 16]
                number = zlib.crc32(repr(part.sum(dtype=_exact(part.dtype)).item()).encode(), number)
    failed = int(place.failures.found is not None)
    both = torch.tensor([number, -number, plan, -plan, failed], device=place.device)
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    except NotSupported as error:
        raise NotSupported(f"{error}. {ALONE}") from None
    largest, smallest, plan, other, failed = both.tolist()
    if failed:
        place.failures.agree()
    if largest != -smallest:
        raise NotSupported(APART.format(name=name))
    if plan != -other:
        raise NotSupported(OTHER_PLANS.format(name=name))


def _exact(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float64 if dtype.is_floating_point else None


class Piped(torch.autograd.Function):
    """The call, for autograd. The anchor has a gradient where nothing that the model is given has."""

    @staticmethod
    def forward(ctx: Any, flow: MicroBatchFlow, graph: bool, anchor: torch.Tensor, *given: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        joined = flow.forward(graph)
        outs = [leaf for leaf in joined.leaves if isinstance(leaf, torch.Tensor)]
        differ = [d for leaf, d in zip(joined.leaves, joined.differ, strict=True) if isinstance(leaf, torch.Tensor)]
        ctx.mark_non_differentiable(*(out for out, d in zip(outs, differ, strict=True) if not d))
        if graph:
            ctx.flow = flow
            ctx.save_for_backward(anchor)  # a second backward is torch's to refuse where no graph was retained
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotSupported(AGAIN)
        _ = ctx.saved_tensors
        again = autograd_engine.keeps_graph()
        return None, None, None, *ctx.flow.backward(list(grads), list(ctx.needs_input_grad[3:]), again)


def call(flow: MicroBatchFlow) -> Any:
    """What the model returns."""
    graph = torch.is_grad_enabled()
    given = [leaf for leaf in flow.leaves if isinstance(leaf, torch.Tensor)]
    if not graph:
        return flow.forward(False).output
    anchor = torch.zeros((), requires_grad=True)
    outs = iter(Piped.apply(flow, graph, anchor, *given))
    joined = flow.joined
    assert joined is not None
    return pytree.tree_map_only(torch.Tensor, lambda _: next(outs), joined.output)
