"""What a cell does to tensors in pieces gives what it would give with the whole: random draws, new tensors.

torch's DTensor knows most operations by pieces. While a cell runs, these are computed here, on every rank alike: the
whole is put together, the operation runs on it, and each rank takes its part of what was written.

- Random numbers: torch would draw on each rank for its own rows, from the same numbers. All ranks draw the whole, from
  the random state of one process (`shared_random.py`).
- Operations that torch has no rule for.
- New tensors (`p.new_zeros(3)`) are ordinary ones: nobody divides them.

All but the last need every rank, as an operation on tensors in pieces may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from nbtrain.compat import dtensor
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.pytree import tree_map_only
from nbtrain.intercept import Listeners
from nbtrain.strategies.kit.shared_random import shared_random_state


def put(listeners: Listeners, around: Callable[[Any], Any]) -> None:
    """While a cell runs. `around`: what may write."""
    listeners.hook(dtensor.compute_by(dtensor.RANDOM, around(_draw)))
    listeners.hook(dtensor.compute_by(dtensor.NEW, _new))
    listeners.hook(dtensor.compute_by(dtensor.WITHOUT_RULE, around(computed)))


# --- the whole and its parts -----------------------------------------------------------------------


def put_together(tensor: DTensor) -> torch.Tensor:
    """All of it as an ordinary tensor with memory of its own. Collective where this rank has a part only."""
    plain: Any = tensor.detach()
    there = local_part(plain).to(plain.device_mesh.device_type)  # rows that were offloaded cannot be sent
    whole: torch.Tensor = DTensor.from_local(
        there, plain.device_mesh, plain.placements, run_check=False, shape=plain.shape, stride=plain.stride()
    ).full_tensor()
    laid_out = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=local_part(plain).device)
    return laid_out.copy_(whole)


def everywhere(whole: torch.Tensor, like: DTensor) -> DTensor:
    """The same on all ranks, among tensors in pieces."""
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def take(tensor: DTensor, whole: torch.Tensor) -> None:
    """This rank's part of new values. Nothing is communicated."""
    there = everywhere(whole.to(tensor.device_mesh.device_type), tensor)
    local_part(tensor).copy_(local_part(there.redistribute(placements=tensor.placements)))


# --- computing --------------------------------------------------------------------------------------


@torch.no_grad()
def computed(op: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the wholes; of what it writes each rank takes its part."""
    like = _first(args, kwargs)
    if _is_meta(like):
        return dtensor.plainly(op, args, kwargs)
    wholes: dict[int, torch.Tensor] = {}

    def whole_of(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return wholes.setdefault(id(tensor), put_together(tensor) if id(tensor) not in wholes else tensor)
        return tensor

    found = op(*tree_map_only(torch.Tensor, whole_of, args), **tree_map_only(torch.Tensor, whole_of, kwargs))
    written = [one for one in dtensor.written(op, args, kwargs) if isinstance(one, DTensor)]
    for one in written:
        take(one, wholes[id(one)])
    own = {id(wholes[id(one)]): one for one in written}
    return tree_map_only(torch.Tensor, lambda t: own[id(t)] if id(t) in own else everywhere(t, like), found)


@torch.no_grad()
def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers as one process draws them. A generator that is given stands alike on all ranks."""
    like = _first(args, kwargs)
    if _is_meta(like):
        return dtensor.plainly(op, args, kwargs)
    given = kwargs.get("generator") is not None
    with nullcontext() if given else shared_random_state(local_part(like).device):
        found = computed(op, args, kwargs)
    if isinstance(found, DTensor) and found.shape == like.shape and not dtensor.written(op, args, kwargs):
        found = found.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in like.placements])
    return found


def _new(op: Any, args: Any, kwargs: Any) -> Any:
    """An ordinary tensor; `zeros_like`, `clone` and the like, whose shape is the weights' own, are operations of their
    own, and stay in pieces."""
    return op(local_part(args[0]), *args[1:], **kwargs)


def _is_meta(tensor: DTensor) -> bool:
    """Shapes are asked for, not numbers."""
    return local_part(tensor).is_meta


def _first(args: Any, kwargs: Any) -> DTensor:
    return next(one for one in _tensors((args, kwargs)) if isinstance(one, DTensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
