"""The whole of a tensor in pieces as autograd follows it, and the part of a whole that a rank keeps of its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.kit.dtensor_operations import full_tensor, is_copy


def full_tensor_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """As an ordinary tensor, which autograd follows where the one in pieces may be differentiated."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return full_tensor(tensor)
    if is_copy(tensor):
        full_tensor(tensor)  # as it is now
        return tensor.to_local()
    full: torch.Tensor = _Whole.apply(tensor)
    return full


class _Whole(torch.autograd.Function):
    """The whole of a tensor in pieces. Each rank's loss counts as it does for the model's own gradients: their mean."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.at = local_part(tensor).device
        return full_tensor(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        there = mean_of_ranks(gradient.to(ctx.mesh.device_type))
        return _gradient(there, ctx.mesh, ctx.placements, ctx.at)


def mean_of_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """The mean of tensors that each rank has whole. Collective."""
    mean = gradient.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


def part_of(full: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that is the same on all ranks, in pieces as `like` is."""
    return _gradient(full.to(like.device_mesh.device_type), like.device_mesh, like.placements, local_part(like).device)


def _gradient(full: torch.Tensor, mesh: Any, placements: Any, device: torch.device) -> DTensor:
    """The gradient of the part that each rank has. The gradient of a summand is that of the sum."""
    there = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    there = there.redistribute(
        placements=[Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    )
    moved: Any = there if local_part(there).device == device else there.to(device)
    return moved  # type: ignore[no-any-return]  # a DTensor, which `to` does not say
