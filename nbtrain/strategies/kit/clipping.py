"""Clips gradients that lie on several ranks to a norm, as `clip_grad_norm_` does in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from nbtrain.compat.tensors import norms as norms_of


def norm_over_ranks(
    own: list[torch.Tensor],
    norm_type: float,
    device: torch.device | str,
    rest: list[torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norm of all. `own`: gradients, or parts of some, that no other rank of the group has. `rest`: those that
    every rank has, which count once. `dtype`: the sum's. Collective."""
    norm_type = float(norm_type)
    largest = norm_type == float("inf")
    total = _sum_of_powers(own, norm_type).to(device, dtype)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    others = _sum_of_powers(rest or [], norm_type).to(device, dtype)
    return torch.maximum(total, others) if largest else (total + others) ** (1 / norm_type)


def _sum_of_powers(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The sum of |x| ** norm_type; for inf the largest |x|."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros(())
    norms = torch.stack([n.to(filled[0].device).float() for n in norms_of(filled, norm_type)])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()


def clip_to(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """In place, by the factor that torch takes."""
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in gradients:
        grad.mul_(share.to(grad.device, grad.dtype))
