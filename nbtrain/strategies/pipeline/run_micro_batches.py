"""One call of a model: its micro-batches go through the stages, and what the last returns goes to every rank.

First all forwards, then all backwards, as GPipe does: the loss is made of the whole output, by the loop. For autograd
the whole call is one node, whose backward runs the stages the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine, pytree
from nbtrain.strategies.pipeline.autograd_calls import AGAIN
from nbtrain.strategies.pipeline.forward_program import Program, plan_of
from nbtrain.strategies.pipeline.micro_batches import BatchCut, Joined, gradients, join
from nbtrain.strategies.pipeline.stage import KeptGraph, Stage, StagePlace
from nbtrain.strategies.pipeline.stage_messages import Packed, StageFailure, packed


class MicroBatchFlow:
    """Made for each call. The same on every rank, but for what it keeps."""

    def __init__(
        self,
        place: StagePlace,
        programs: list[Program],
        leaves: list[Any],
        slices: list[list[Any]],
        cut: BatchCut,
        name: str,
    ) -> None:
        """`programs`: of each micro-batch. `leaves`: what the model is given; `slices`: the micro-batches of it."""
        self.place, self.programs, self.cut, self.name = place, programs, cut, name
        self.leaves, self.slices = leaves, slices
        self.stretches: list[KeptGraph | None] = []
        self.joined: Joined | None = None
        self.stages: list[Stage] = []
        self.failed: Callable[[], None] = lambda: None
        """called before a failure of a stage is raised"""

    # --- forward -------------------------------------------------------------------------------

    def forward(self, graph: bool) -> Joined:
        """Collective."""
        place = self.place
        place.meet(self.name, self.leaves, plan_of(self.programs))
        self.stages = [Stage(place, program, graph, i == 0) for i, program in enumerate(self.programs)]
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
        place.meet(self.name)
        sliced = gradients(grads, self.cut)
        kept: list[KeptGraph] = []
        for i, stretch in enumerate(self.stretches):
            assert stretch is not None
            self.stages[i].backward(stretch, sliced[i] if place.rank == place.last else None, again)
            if not again:
                stretch.ends = []
            kept.append(stretch)
        place.channel.settle()
        found = self._of_inputs(kept, wanted)
        if not place.accumulates:  # no backward of all parameters follows, where ranks would hear of a failure
            place.meet(self.name)
        return found

    def _of_inputs(self, stretches: list[KeptGraph], wanted: list[bool]) -> list[Any]:
        """What all stages have made of the gradients of what the model was given."""
        gradients: list[Any] = []
        tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        for i, wants in zip(tensors, wanted, strict=True):
            if not wants:
                gradients.append(None)
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
            gradients.append(total)
        return gradients


class PipelinedCall(torch.autograd.Function):
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
    outs = iter(PipelinedCall.apply(flow, graph, anchor, *given))
    joined = flow.joined
    assert joined is not None
    return pytree.tree_map_only(torch.Tensor, lambda _: next(outs), joined.output)
