"""An optimizer's state and the norm of gradients, where every rank has some rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.row_shards import cut, fresh_storage, rebind
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
    parts = [local_part(p.grad) for p in held if isinstance(p.grad, DTensor)]
    rest = [p.grad for p in held if p.grad is not None and not isinstance(p.grad, DTensor)]
    total = norm_over_ranks(parts, norm_type, mesh.device_type, rest, group=mesh.get_group(mesh.ndim - 1))
    total = total.to(torch.float32 if all(g.dtype != torch.float64 for g in (*parts, *rest)) else torch.float64)
    clip_to((*parts, *rest), total, max_norm)
    counts[1] += 1
    return total.to(parts[0].device) if parts else total
