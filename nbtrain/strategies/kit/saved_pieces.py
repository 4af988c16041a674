"""What a cell is about to save (a state dict), with whole tensors in the places of those in pieces.

Of tensors that are divided by rows one at a time is gathered to the rank that writes, into its main memory. DTensor,
which takes long to import, is not imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat.dtensor import is_divided, local
from nbtrain.strategies.kit.sharded_state import StateStandIn


def holds_shards(value: Any) -> bool:
    """Whether there is a tensor in pieces in these dicts, lists and tuples. Equal on all ranks."""
    return next(_shards(value, set()), None) is not None


def with_full_tensors(value: Any, to: int | None = None) -> Any:
    """Collective: all ranks call it with the same structure. The structure with full tensors on every rank, or on rank
    `to`, and None in their place on the others. What holds no tensor in pieces is returned as it is."""
    return _with(value, lambda shard: _full(shard, to))


def _full(shard: Any, to: int | None) -> torch.Tensor | None:
    from nbtrain.strategies.kit.row_shards import to_one, whole

    if to is not None and not isinstance(shard, StateStandIn):
        return to_one(shard, to)
    full: torch.Tensor = shard.clone() if isinstance(shard, StateStandIn) else whole(shard)
    return full.cpu() if to in (None, dist.get_rank()) else None


def _in_pieces(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (isinstance(value, StateStandIn) or is_divided(value))


def _with(value: Any, take: Callable[[Any], torch.Tensor | None]) -> Any:
    """A copy of the structure, with `take(tensor)` in the place of each tensor in pieces."""
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


def _shards(value: Any, seen: set[int]) -> Iterator[Any]:
    """Each tensor in pieces once, in an order that is the same on all ranks."""
    if id(value) not in seen and (_in_pieces(value) or isinstance(value, dict | list | tuple)):
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _shards(inner, seen)


def _storage(tensor: Any) -> Any:
    if isinstance(tensor, StateStandIn):
        return id(tensor)
    part = local(tensor)
    memory = part.untyped_storage().data_ptr() or id(tensor)
    return memory, part.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _rebuilt(value: Any, full: dict[int, torch.Tensor | None], done: dict[int, Any]) -> Any:
    if id(value) in full:
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
