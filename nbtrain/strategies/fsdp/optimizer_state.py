"""An optimizer's state and the norm of gradients, where every rank has some rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.kit.row_shards import cut, fresh_storage, rebind, sum_of_powers
from nbtrain.strategies.kit.tensor_views import counts


def cut_state(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape in its state: this rank's rows."""
    if isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    if value.is_meta:
        return fresh_storage(cut(parameter, value), local_part(parameter).device)
    return cut(parameter, value)


def cut_loaded(optimizer: torch.optim.Optimizer) -> None:
    """After `load_state_dict` of a state that is whole."""
    held: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    rebind(optimizer, {key: p for key, p in held.items() if isinstance(p, DTensor)}, cut_state)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[DTensor]:
    """In the order of the groups: that of the state is when a parameter was first stepped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state: Any = optimizer.state.get(p)
            for key in sorted(state, key=str) if isinstance(state, dict) else ():
                if isinstance(state[key], DTensor):
                    yield state[key]


@torch.no_grad()
def clip_norm(held: list[torch.Tensor], mesh: DeviceMesh, max_norm: float, norm_type: float) -> torch.Tensor:
    """As torch's `clip_grad_norm_`, which would return a DTensor and knows nothing of parameters that are whole."""
    norm_type = float(norm_type)
    parts = [local_part(p.grad) for p in held if isinstance(p.grad, DTensor)]
    rest = [p.grad for p in held if p.grad is not None and not isinstance(p.grad, DTensor)]
    here = sum_of_powers(parts, norm_type).to(mesh.device_type)
    largest = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    dist.all_reduce(here, op=operation, group=mesh.get_group(mesh.ndim - 1))
    others = sum_of_powers(rest, norm_type).to(here.device)
    total = torch.maximum(here, others) if largest else (here + others) ** (1 / norm_type)
    total = total.to(torch.float32 if all(g.dtype != torch.float64 for g in (*parts, *rest)) else torch.float64)
    share = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (*parts, *rest):
        grad.mul_(share.to(grad.device, grad.dtype))
    counts[1] += 1
    return total.to(parts[0].device) if parts else total
