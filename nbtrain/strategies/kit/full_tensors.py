"""Full tensors in place of sharded ones, in what a cell is about to save: `model.state_dict()`, an optimizer's.

One tensor at a time is gathered to the rank that writes, into its main memory; no other rank ever has a whole one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.kit.row_shards import by_rows, rows, whole


def holds_shards(value: Any) -> bool:
    """Whether there is a sharded tensor in these dicts, lists and tuples. Equal on all ranks."""
    return next(_shards(value, set()), None) is not None


def gathered(value: Any, to: int = 0) -> Any:
    """Collective: all ranks call it with the same structure. The structure with full tensors on rank `to`, and with
    None in their place on the others. What holds no sharded tensor is returned as it is."""
    return _with(value, lambda shard: _to_one(shard, to))


def everywhere(value: Any) -> Any:
    """Collective, as `gathered`, with full tensors on every rank."""
    return _with(value, lambda shard: whole(shard).cpu())


def _with(value: Any, take: Callable[[DTensor], torch.Tensor | None]) -> Any:
    """The structure with what is taken of each sharded tensor in its place."""
    shards = list(_shards(value, set()))
    if not shards:
        return value
    # Tied weights stay tied. Rank 0 says which they are: it always has rows, by which they can be told.
    first: dict[Any, int] = {}
    told = [[first.setdefault(_storage(shard), i) for i, shard in enumerate(shards)]]
    dist.broadcast_object_list(told, src=0)
    full: dict[int, torch.Tensor | None] = {}
    for i, other in enumerate(told[0]):
        full[id(shards[i])] = take(shards[i]) if other == i else full[id(shards[other])]
    return _rebuilt(value, full, {})


def _shards(value: Any, seen: set[int]) -> Iterator[DTensor]:
    """Each once, in an order that is the same on all ranks."""
    if isinstance(value, DTensor | dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, DTensor):
            yield value
        else:
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _shards(inner, seen)


def _storage(tensor: DTensor) -> Any:
    local = local_part(tensor)
    memory = local.untyped_storage().data_ptr() or id(tensor)
    return memory, local.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _rebuilt(value: Any, full: dict[int, torch.Tensor | None], done: dict[int, Any]) -> Any:
    if isinstance(value, DTensor):
        return full[id(value)]
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, dict):
        new: Any = copy.copy(value)  # of its own class, with the metadata that torch puts on it
        done[id(value)] = new
        for key, inner in value.items():
            new[key] = _rebuilt(inner, full, done)
    elif isinstance(value, list):
        new = done[id(value)] = []
        new += [_rebuilt(inner, full, done) for inner in value]
    else:
        parts = [_rebuilt(inner, full, done) for inner in value]
        new = done[id(value)] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return new


@torch.no_grad()
def _to_one(tensor: DTensor, to: int) -> torch.Tensor | None:
    if not by_rows(tensor):  # a norm, or a weight that was transposed
        full = whole(tensor)
        return full.cpu() if dist.get_rank() == to else None
    mesh = tensor.device_mesh
    last = mesh.ndim - 1
    group = mesh.get_group(last)
    if to not in dist.get_process_group_ranks(group):  # of several that keep the same, its own speaks
        return None
    start, stop = rows(tensor)
    size = -(-tensor.shape[0] // mesh.size(last))
    mine = local_part(tensor).detach().to(mesh.device_type)
    if stop - start < size:  # pieces of one size are sent
        padded = mine.new_zeros((size, *tensor.shape[1:]))
        padded[: stop - start] = mine
        mine = padded
    parts = [torch.empty_like(mine) for _ in range(mesh.size(last))] if dist.get_rank() == to else None
    dist.gather(mine.contiguous(), parts, dst=to, group=group)
    return None if parts is None else torch.cat(parts)[: tensor.shape[0]].cpu()
