"""Full tensors in place of sharded ones, in what a cell is about to save: `model.state_dict()`, an optimizer's.

One tensor at a time is gathered to rank 0, into its main memory; no other rank ever has a whole one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbtrain.strategies.shards import rows


def holds_shards(value: Any) -> bool:
    """Whether there is a sharded tensor in these dicts, lists and tuples. Equal on all ranks."""
    return any(isinstance(one, DTensor) for one in _leaves(value, set()))


def gathered(value: Any) -> Any:
    """Collective: all ranks call it with the same structure. The structure with full tensors on rank 0, and with None
    in their place on the others. What holds no sharded tensor is returned as it is."""
    return _gathered(value, {}) if holds_shards(value) else value


def _leaves(value: Any, seen: set[int]) -> Any:
    if isinstance(value, dict | list | tuple):
        if id(value) not in seen:
            seen.add(id(value))
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _leaves(inner, seen)
    else:
        yield value


def _gathered(value: Any, done: dict[int, Any]) -> Any:
    if id(value) in done:  # tied weights stay tied
        return done[id(value)]
    if isinstance(value, DTensor):
        done[id(value)] = _to_first(value)
    elif isinstance(value, dict):
        new = done[id(value)] = copy.copy(value)  # of its own class, with the metadata that torch puts on it
        for key, inner in value.items():
            new[key] = _gathered(inner, done)
    elif isinstance(value, list):
        done[id(value)] = [_gathered(inner, done) for inner in value]
    elif isinstance(value, tuple):
        parts = [_gathered(inner, done) for inner in value]
        done[id(value)] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    else:
        return value
    return done[id(value)]


@torch.no_grad()
def _to_first(tensor: DTensor) -> torch.Tensor | None:
    mesh = tensor.device_mesh
    last = mesh.ndim - 1
    group = mesh.get_group(last)
    if 0 not in dist.get_process_group_ranks(group):  # of several that keep the same, the first speaks
        return None
    start, stop = rows(tensor)
    size = -(-tensor.shape[0] // mesh.size(last))
    mine = tensor._local_tensor.detach().to(mesh.device_type)
    if stop - start < size:  # pieces of one size are sent
        padded = mine.new_zeros((size, *tensor.shape[1:]))
        padded[: stop - start] = mine
        mine = padded
    parts = [torch.empty_like(mine) for _ in range(mesh.size(last))] if dist.get_rank() == 0 else None
    dist.gather(mine.contiguous(), parts, dst=0, group=group)
    return None if parts is None else torch.cat(parts)[: tensor.shape[0]].cpu()
