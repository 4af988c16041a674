"""What a cell does to tensors in pieces gives what it would give with the whole: random draws, rows, new tensors.

torch's DTensor knows most operations by pieces. While a cell runs, these are computed here, on every rank alike: the
whole is put together, the operation runs on it, and each rank takes its part of what was written.

- Random numbers: torch would draw on each rank for its own rows, from the same numbers. All ranks draw the whole, from
  the stream of one process (`drawing.py`).
- Operations that torch has no rule for.
- Rows of a tensor (`p.data[1:3].zero_()`), which torch copies: what is written to the copy is written to the tensor.
- New tensors (`p.new_zeros(3)`) are ordinary ones: nobody divides them.

All but the last need every rank, as an operation on tensors in pieces may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat import dtensor
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners
from nbtrain.strategies.drawing import one_stream

OTHER = (
    "`p.data = tensor` of the form {} and {} in the place of {} and {}: under fsdp a weight in pieces keeps its "
    "shape and dtype. Make the tensor alike, or change the model in the notebook before the cell"
)
DIFFERS = (
    "`p.data = tensor` with a tensor that differs between ranks: under fsdp each rank keeps its part of one tensor. "
    "Give all ranks the same: `p.data = reduce(tensor)`"
)


def put(listeners: Listeners) -> None:
    """While a cell runs."""
    listeners.listen("torch.distributed.tensor.DTensor.data", "values", _data)
    copies = _Copies(listeners)
    listeners.hook(dtensor.compute_by(dtensor.RANDOM, copies.passing_on(_draw)))
    listeners.hook(dtensor.compute_by(dtensor.NEW, _new))
    listeners.hook(dtensor.compute_by(dtensor.ROWS, copies.rows))
    listeners.hook(dtensor.compute_by(dtensor.WITHOUT_RULE, copies.passing_on(_computed)))


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
def _computed(op: Any, args: Any, kwargs: Any) -> Any:
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
    with nullcontext() if given else one_stream(local_part(like).device):
        found = _computed(op, args, kwargs)
    if isinstance(found, DTensor) and found.shape == like.shape and not dtensor.written(op, args, kwargs):
        found = found.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in like.placements])
    return found


def _new(op: Any, args: Any, kwargs: Any) -> Any:
    """An ordinary tensor; `zeros_like`, `clone` and the like, whose shape is the weights' own, are operations of their
    own, and stay in pieces."""
    return op(local_part(args[0]), *args[1:], **kwargs)


def _data(old: property) -> property:
    return property(old.fget, lambda tensor, value: _put_there(old, tensor, value))


@torch.no_grad()
def _put_there(old: property, tensor: DTensor, value: Any) -> None:
    """`p.data = value`. Collective where the value is an ordinary tensor, or divided in another way."""
    if (
        local_part(tensor).is_meta
        or not isinstance(value, torch.Tensor)
        or (isinstance(value, DTensor) and value.dtype != tensor.dtype)
    ):
        old.fset(tensor, value)  # type: ignore[misc]
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise NotSupported(OTHER.format(tuple(value.shape), value.dtype, tuple(tensor.shape), tensor.dtype))
    if isinstance(value, DTensor):
        local_part(tensor).copy_(local_part(value.redistribute(placements=tensor.placements)))
        return
    if not _same_everywhere(value.to(tensor.device_mesh.device_type)):
        raise NotSupported(DIFFERS)
    take(tensor, value)


def _same_everywhere(value: torch.Tensor) -> bool:
    first = value.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, src=0)
    differs = (~torch.isclose(first, value, rtol=0, atol=0, equal_nan=True)).any().float()
    dist.all_reduce(differs)
    return not differs


class _Copies:
    """Rows that torch has copied out of tensors in pieces, and what is written to them."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._taken: Any = WeakTensorKeyDictionary()
        """copy → the tensor it was taken from, and how it lies in the whole"""
        self._watching = False

    def rows(self, op: Any, args: Any, kwargs: Any) -> Any:
        tensor: DTensor = args[0]
        try:
            found = dtensor.plainly(op, args, kwargs)
        except RuntimeError:  # in this shape the rows cannot be divided, or not be told apart
            found = _computed(op, args, kwargs)
        for number, part in enumerate([found] if isinstance(found, torch.Tensor) else found):
            # A row of rows that were copied lies in the copy: what is written to it is to go the same way.
            if not _is_meta(tensor) and (local_part(tensor) in self._taken or not _shares_memory(part, tensor)):
                self._note(part, tensor, op, args[1:], kwargs, None if part is found else number)
        return found

    def _note(self, part: Any, tensor: DTensor, op: Any, rest: Any, kwargs: Any, number: int | None) -> None:
        def of(whole: torch.Tensor) -> torch.Tensor:
            found: Any = op(whole, *rest, **kwargs)
            return found if number is None else found[number]  # type: ignore[no-any-return]

        self._taken[local_part(part)] = tensor, of
        if not self._watching:
            self._watching = True
            self._listeners.hook(dtensor.compute_by(dtensor.writing_operations(), self._write))

    def _write(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(args[0], DTensor) or local_part(args[0]) not in self._taken:
            return dtensor.plainly(op, args, kwargs)
        found = _computed(op, args, kwargs)
        self._pass_on(args[0])
        return found

    def passing_on(self, compute: Any) -> Any:
        """What is written to rows that were copied is written to the tensor, too."""

        def computed(op: Any, args: Any, kwargs: Any) -> Any:
            found = compute(op, args, kwargs)
            for one in dtensor.written(op, args, kwargs):
                self._pass_on(one)
            return found

        return computed

    @torch.no_grad()
    def _pass_on(self, part: Any) -> None:
        origin = self._taken.get(local_part(part)) if isinstance(part, DTensor) else None
        if origin is not None:
            tensor, of = origin
            whole = put_together(tensor)
            of(whole).copy_(put_together(part))
            take(tensor, whole)
            self._pass_on(tensor)


def _shares_memory(part: torch.Tensor, tensor: DTensor) -> bool:
    mine = local_part(part).untyped_storage()
    return mine.nbytes() == 0 or mine.data_ptr() == local_part(tensor).untyped_storage().data_ptr()


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
