"""`--balance time` and `memory`: what each part costs, measured on one micro-batch as it flows through the stages.

By time: its forward and backward. By memory: what it keeps from the one for the other, and its parameters with their
gradients. Nothing of it stays: buffers are put back, and gradients go nowhere.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat import pytree, tensors
from nbtrain.strategies.pipeline.cut_stages import StagedModel, cut_evenly, size
from nbtrain.strategies.pipeline.forward_program import Step
from nbtrain.strategies.pipeline.run_micro_batches import MicroBatchFlow
from nbtrain.strategies.pipeline.stage import StagePlace

REPEATS = 3


def measured(staged: StagedModel, place: StagePlace, flow: MicroBatchFlow, by: str) -> list[int]:
    """How many parts each stage is to have. `flow`: of one micro-batch. Collective."""
    costs = [0.0] * len(staged.parts)
    with tensors.as_plain_tensors():
        buffers = [(b, b.detach().clone()) for part in staged.stages()[place.rank] for b in part.buffers()]

    def around(step: Step, args: Any, kwargs: Any) -> None:
        if step.part is not None:
            costs[step.part] += _time(step, args, kwargs) if by == "time" else _memory(step, args, kwargs)

    place.around = around
    try:
        with torch.no_grad():
            flow.forward(False)
    finally:
        place.around = None
        with torch.no_grad(), tensors.as_plain_tensors():
            for buffer, before in buffers:
                buffer.copy_(before)
    found = torch.tensor(costs, dtype=torch.float64).to(place.device, torch.float64)
    dist.all_reduce(found)
    return cut_evenly(found.tolist(), place.ranks)


def _time(step: Step, args: Any, kwargs: Any) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        _both_ways(step, args, kwargs)
        best = min(best, time.perf_counter() - began)
    return best


def _memory(step: Step, args: Any, kwargs: Any) -> float:
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _both_ways(step, args, kwargs)
    part = step.call
    if isinstance(part, nn.Module):
        for p in part.parameters():
            held.pop(p.untyped_storage().data_ptr(), None)
        return float(sum(held.values()) + 2 * 4 * size(part))
    return float(sum(held.values()))


def _both_ways(step: Step, args: Any, kwargs: Any) -> None:
    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.is_floating_point())

    args, kwargs = pytree.tree_map_only(torch.Tensor, apart, (args, kwargs))
    with torch.enable_grad():
        returned = step.call(*args, **kwargs)
        ends = [t for t in pytree.tree_leaves(returned) if isinstance(t, torch.Tensor) and t.requires_grad]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if isinstance(step.call, nn.Module):
            given += [p for p in step.call.parameters() if p.requires_grad]
        total = sum(t.float().sum() for t in ends)
    if isinstance(total, torch.Tensor) and given:
        torch.autograd.grad(total, given, allow_unused=True)
        if total.is_cuda:
            torch.cuda.synchronize(total.device)
