"""Memory in which a weight was, or is copied to, while ranks keep and train the weight elsewhere.

What was made of the weight before, `w = model.weight.detach()` in the notebook, still has it: in one process it is the
weight's own. Where weights are shown complete, to read or write `w` would mean the weight, and reach nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nbtrain.compat.tensors import memory_id

SHOWN = "nbtrain_shown"
"""a method of tensors that find what they show anew each time they are used: the weights that it is a part of"""
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
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or in a transform of torch.func
        return None
