"""Memory in which a weight was, or is copied to, while ranks keep and train the weight elsewhere.

What was made of the weight before, `w = model.weight.detach()` in the notebook, still has it: in one process it is the
weight's own. Where weights are shown complete, to read or write `w` would mean the weight, and reach nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nbtrain.compat.tensors import memory_id

SHOWN = "nbtrain_shown"
"""a method of tensors that find what they show anew each time they are used: the weights that it is a part of"""
KINDS = torch.Tensor, torch.nn.Parameter
"""classes of tensors that have memory of their own"""
MANY = 256
"""entries that are kept without a look at who has their memory still"""
_left: dict[int, tuple[StorageWeakRef, str]] = {}
_bound = MANY


class Memory:
    """Where these tensors are now; nothing is kept alive."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {name: memory_of(tensor) for name, tensor in named}
        self.found = {name: StorageWeakRef(memory) for name, memory in places.items() if memory is not None}

    def left(self, still: Iterable[torch.Tensor] = ()) -> None:
        """They are elsewhere from now on, but for what these are in `still`."""
        global _bound
        kept = {memory_id(memory) for memory in map(memory_of, still) if memory is not None}
        _left.update({ref.cdata: (ref, name) for name, ref in self.found.items() if ref.cdata not in kept})
        if len(_left) > _bound:
            for key in [key for key, (ref, _) in _left.items() if ref.expired()]:
                del _left[key]
            _bound = max(MANY, 2 * len(_left))


def left_by(tensor: torch.Tensor) -> str | None:
    """The name of the weight that was in this tensor's memory, or None."""
    memory = memory_of(tensor) if _left else None
    return None if memory is None else _left.get(memory_id(memory), (None, None))[1]


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if type(tensor) not in KINDS:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or in a transform of torch.func
        return None


def leave_to_others(places: Sequence[torch.Tensor], known: Iterable[torch.Tensor]) -> None:
    """These parts of a buffer are about to be written anew. What else shows one of them (`p.data, s.data = s.data,
    p.data`) gets memory of its own, with what is there; `known` are the buffer's owner's. Looks at all objects."""
    ours = {*map(id, places), *map(id, known)}
    buffers = {memory_id(place.untyped_storage()) for place in places}
    every = [value for value in gc.get_objects() if type(value) in KINDS]  # no call for each: there are 200,000
    others = [tensor for tensor in every if _lies_in(tensor, buffers) and id(tensor) not in ours]
    for place in places:
        begin = place.storage_offset()
        inside = [tensor for tensor in others if is_part(tensor, place)]
        kept = place.detach().clone() if inside else place
        for tensor in inside:
            tensor.data = kept.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - begin)


def _lies_in(tensor: torch.Tensor, buffers: Container[int]) -> bool:
    memory = memory_of(tensor)
    return memory is not None and memory_id(memory) in buffers


def is_part(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    first, begin = tensor.storage_offset(), place.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    same = memory_id(tensor.untyped_storage()) == memory_id(place.untyped_storage())
    return same and tensor.numel() > 0 and begin <= first and last < begin + place.numel()
