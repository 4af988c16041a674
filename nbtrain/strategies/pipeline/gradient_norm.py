"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks


@torch.no_grad()
def clip_norm(
    held: list[torch.Tensor],
    owned: set[int],
    foreign: set[int],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """As torch's `clip_grad_norm_`. `owned`: ids of what one rank has alone; the rest every rank has, and it counts
    once. Collective."""
    norm_type = float(norm_type)
    grads = [(p, p.grad) for p in held if p.grad is not None and id(p) not in foreign]
    own = [grad for p, grad in grads if id(p) in owned]
    rest = [grad for p, grad in grads if id(p) not in owned]
    if 0 < norm_type < float("inf"):  # in double: ranks may have gradients of other types, or none
        total = norm_over_ranks(own, norm_type, device, rest, torch.float64)
    else:
        norms = [float(torch.linalg.vector_norm(grad, norm_type)) for grad in own]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, norms)
        norms = [norm for found in everybody for norm in found]
        norms += [float(torch.linalg.vector_norm(grad, norm_type)) for grad in rest]
        found = torch.tensor(norms or [0.0], dtype=torch.float64, device=device)
        total = torch.linalg.vector_norm(found, norm_type)
    total = total.to(torch.float64 if any(p.dtype == torch.float64 for p in held) else torch.float32)
    clip_to((*own, *rest), total, max_norm)
    return total
