"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nbtrain.strategies._pipeline.elsewhere import Elsewhere
from nbtrain.strategies.shards import sum_of_powers


@torch.no_grad()
def clip_norm(
    held: list[torch.Tensor], owned: set[int], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """As torch's `clip_grad_norm_`. `owned`: ids of what one rank has alone; the rest every rank has, and it counts
    once. Collective."""
    norm_type = float(norm_type)
    grads = [(p, p.grad) for p in held if p.grad is not None and not isinstance(p.grad, Elsewhere)]
    own = [grad for p, grad in grads if id(p) in owned]
    rest = [grad for p, grad in grads if id(p) not in owned]
    largest = norm_type == float("inf")
    here = sum_of_powers(own, norm_type).to(device)
    dist.all_reduce(here, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    others = sum_of_powers(rest, norm_type).to(device)
    total = torch.maximum(here, others) if largest else (here + others) ** (1 / norm_type)
    share = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (*own, *rest):
        grad.mul_(share.to(grad.device, grad.dtype))
    return total
