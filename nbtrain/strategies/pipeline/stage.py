"""A model's forward and backward on the stage of one rank, micro-batch by micro-batch.

A graph begins in a stage with a `StageInput`, which keeps the gradient that the stage before is to have, and ends with
what goes to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import intercept, pytree
from nbtrain.strategies.kit.random_draws import OwnRandom
from nbtrain.strategies.kit.stage_tensors import StageTensors
from nbtrain.strategies.pipeline.forward_program import Program
from nbtrain.strategies.pipeline.module_state import ModuleState
from nbtrain.strategies.pipeline.stage_messages import (
    Packed,
    StageChannel,
    StageErrors,
    fingerprint,
    meet,
    packed,
)

APART = (
    "the ranks have called {name} with different batches: under pipeline every rank must see the same ones. Let "
    "nothing of a batch depend on the rank, and let no rank draw random numbers alone, from which the loader's next "
    "order comes (below `if rank == 0:` write `with torch.random.fork_rng():` around it); or use --strategy ddp"
)

OTHER_PLANS = (
    "the forward of {name} does not do the same on every rank: something that it reads (a global, an attribute, a "
    "file, `rank`), or a hook in it, differs between them, and under pipeline each rank computes a part of one "
    "forward. Let nothing in a forward depend on the rank, or use --strategy ddp"
)


class StagePlace:
    """What the stages of one component share on this rank, and what is under way there."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.channel = StageChannel(device)
        self.failures = StageErrors(self.rank)
        self.random_state = OwnRandom(self.rank + 1)
        self.inside = False
        """a stage of this rank computes, or its backward does"""
        self.everywhere = False
        """every rank computes all of a model, with weights that are sent: for a hook in it, or with others in a call"""
        self.accumulates = True
        """a backward that runs now leaves gradients in parameters"""
        self.roots: list[torch.Tensor] = []
        """what the loop's backward that runs now started from"""
        self.stage_tensors = StageTensors(self.rank, self, device)
        self.iterating: list[Any] = []
        """spectral norms: in a call of the model each goes on once, in the first micro-batch"""

    @property
    def busy(self) -> bool:
        """Models are called as they are."""
        return self.inside or self.everywhere

    @contextmanager
    def computing_everywhere(self) -> Iterator[None]:
        """Models are called as they are, on every rank."""
        before, self.everywhere = self.everywhere, True
        try:
            yield
        finally:
            self.everywhere = before

    @property
    def last(self) -> int:
        return self.ranks - 1

    def meet(self, name: str, leaves: Iterable[Any] = (), plan: int = 0) -> None:
        """All ranks are here, with the same batch and the same plan, or raise. `name`: of the model. Collective."""
        numbers = {APART.format(name=name): fingerprint(leaves), OTHER_PLANS.format(name=name): plan}
        meet(self.failures, self.device, numbers)

    @contextmanager
    def computing(self, graph: bool) -> Iterator[None]:
        """This rank's weights are ordinary tensors meanwhile, and random numbers are its own."""
        before, self.inside = self.inside, True
        # No hooks from around: what a checkpoint around the model would compute again has its own graph here.
        saved_as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        try:
            with (
                self.stage_tensors.own_plain(),
                torch.set_grad_enabled(graph),
                saved_as_they_are,
                self.random_state(),
            ):
                yield
        finally:
            self.inside = before


@dataclass(slots=True)
class InputGradient:
    """What a `StageInput` gives, and what comes back to it."""

    tensor: torch.Tensor | None
    anchor: torch.Tensor
    grad: torch.Tensor | None = None


class StageInput(torch.autograd.Function):
    """Not a leaf: what follows may change it in place."""

    @staticmethod
    def forward(ctx: Any, box: InputGradient, anchor: torch.Tensor) -> Any:
        ctx.box = box
        tensor, box.tensor = box.tensor, None
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        box = ctx.box
        box.grad = grad if box.grad is None else box.grad + grad
        return None, None


@dataclass(slots=True)
class KeptGraph:
    """What a stage keeps of one micro-batch for its backward."""

    inputs: list[InputGradient | None] = field(default_factory=list)
    """of what the model was given"""
    boxes: list[InputGradient] = field(default_factory=list)
    """of what the stage before has sent"""
    ends: list[torch.Tensor] = field(default_factory=list)
    """with a graph, in the order in which they were sent"""


def enter(tensor: torch.Tensor, boxes: list[Any]) -> Any:
    anchor = torch.zeros((), requires_grad=True)
    box = InputGradient(tensor, anchor)
    boxes.append(box)
    return StageInput.apply(box, anchor)


class Stage:
    """One rank's part of one call."""

    def __init__(self, place: StagePlace, program: Program, graph: bool, first: bool) -> None:
        """`first`: it is for the first micro-batch."""
        self.place, self.program, self.graph, self.first = place, program, graph, first

    def forward(self, given: list[Any]) -> tuple[KeptGraph, Any]:
        """`given`: what the model is given of this micro-batch. On the last rank also what it returns, with its
        graph. Nothing, where some stage has failed: the others are told all the same, for they wait."""
        place, stretch = self.place, KeptGraph()
        incoming = place.channel.receive(place.rank - 1) if place.rank else []
        place.failures.know(incoming)
        result: Any = None
        message: Packed | None = None
        if place.failures.found is None:
            try:
                result, message = self._compute(given, incoming, stretch)
            except Exception as error:  # whatever the user's modules raise
                place.failures.take(error)
        if place.rank != place.last:
            place.channel.put(message or packed(place.failures.found), place.rank + 1)
        return stretch, result

    def _compute(self, given: list[Any], incoming: list[Any], stretch: KeptGraph) -> tuple[Any, Packed | None]:
        """What the last stage returns; what others send."""
        place = self.place
        values: dict[int, Any] = {}
        with place.computing(self.graph):
            for number, leaf in enumerate(given):
                if self.graph and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    values[number] = enter(leaf.detach().clone(), stretch.inputs)
                else:
                    values[number] = leaf
                    stretch.inputs.append(None)
            crossing = self.program.crossing[place.rank - 1] if place.rank else []
            for number, value in zip(crossing, incoming, strict=True):
                values[number] = pytree.tree_map_only(torch.Tensor, lambda t: self._enter(t, stretch), value)
            resting = [] if self.first else [(norm, norm.n_power_iterations) for norm in place.iterating]
            try:
                for norm, _ in resting:
                    norm.n_power_iterations = 0
                self.program.runs += 1
                # What is there since the first run, and stays, is a cache.
                before = ModuleState(self.program.modules(place.rank)) if self.program.runs == 2 else None
                self.program.run(place.rank, values)
                if before is not None:
                    before.check(self.first)
            finally:
                for norm, iterations in resting:
                    norm.n_power_iterations = iterations
        if place.rank == place.last:
            result = self.program.result(values)
            stretch.ends = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            return result, None
        leaving = [values[number] for number in self.program.crossing[place.rank]]
        stretch.ends = [t for t in pytree.tree_leaves(leaving) if isinstance(t, torch.Tensor) and t.requires_grad]
        return None, packed(leaving)

    def _enter(self, tensor: torch.Tensor, stretch: KeptGraph) -> Any:
        if tensor.requires_grad and self.graph:
            return enter(tensor.detach(), stretch.boxes)
        return tensor.detach()

    def backward(self, stretch: KeptGraph, grads: list[Any] | None, again: bool) -> None:
        """`grads`: of what the last stage returned; others are sent theirs. `again`: the graph is kept."""
        place = self.place
        if grads is None:
            grads = place.channel.receive(place.rank + 1, back=True)
        place.failures.know(grads)
        message: Packed | None = None
        if place.failures.found is None:
            try:
                self._backward(stretch, grads, again)
                message = packed([box.grad for box in stretch.boxes]) if place.rank else None
            except Exception as error:  # a hook's, or an autograd function's of the user's
                place.failures.take(error)
        if place.rank:
            place.channel.put(message or packed(place.failures.found), place.rank - 1, back=True)
            for box in stretch.boxes:
                box.grad = None

    def _backward(self, stretch: KeptGraph, grads: list[Any], again: bool) -> None:
        pairs = [
            (end, grad) for end, grad in zip(stretch.ends, grads, strict=True) if grad is not None and end.requires_grad
        ]
        boxes = [*stretch.boxes, *(box for box in stretch.inputs if box is not None)]
        for box in boxes:
            box.grad = None
        if pairs:
            self._differentiate([end for end, _ in pairs], [grad for _, grad in pairs], boxes, again)

    def _differentiate(self, ends: list[Any], grads: list[Any], boxes: list[InputGradient], again: bool) -> None:
        with self.place.computing(False):
            if self.place.accumulates:
                # The function itself: who listens to it counts the loop's calls.
                given = [torch.ones_like(e) if g is None else g for e, g in zip(ends, grads, strict=True)]
                intercept.original("torch.autograd.backward")(ends, given, retain_graph=again)
            elif boxes:
                torch.autograd.grad(ends, [box.anchor for box in boxes], grads, retain_graph=again, allow_unused=True)
