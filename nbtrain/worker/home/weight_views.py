"""Finds, when a cell has ended, what it leaves behind that shows a weight in pieces: `state = model.state_dict()`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from nbtrain.base.when_imported import if_imported
from nbtrain.compat.dtensor import is_divided, local
from nbtrain.compat.tensors import memory_id
from nbtrain.exchange.kinds.split_tensors import Place
from nbtrain.strategies.kit.memory_left_behind import is_part, memory_of
from nbtrain.strategies.kit.shown_weights import shown_by as noted_of
from nbtrain.worker.home.pieces import is_stage_tensor, tensors_below


class WeightViews:
    """Tensors in pieces, by their memory. `pieces`: those that a strategy knows."""

    def __init__(self, pieces: Sequence[tuple[Any, Any]]) -> None:
        self._pieces = pieces
        self._ids = {id(tensor) for tensor, _ in pieces}
        self._of_stage = if_imported("nbtrain.strategies.kit.stage_tensor", "shown_by_view")
        self._dtensor = if_imported("torch.distributed.tensor", "DTensor")
        self._in_rows = if_imported("nbtrain.strategies.kit.dtensor_operations", "shown_by")

    @cached_property
    def _rows(self) -> dict[int, Any]:
        """Those divided by rows, by the number of this rank's part's memory."""
        return {memory_id(local(t).untyped_storage()): t for t, _ in self._pieces if is_divided(t)}

    @cached_property
    def _plain(self) -> dict[int, list[Any]]:
        """Those that every rank has, by the number of the memory in which they lie."""
        found: dict[int, list[Any]] = {}
        for tensor in [tensor for tensor, piece in self._pieces if piece.everywhere]:
            if (memory := memory_of(tensor)) is not None:
                found.setdefault(memory_id(memory), []).append(tensor)
        return found

    def below(self, values: Mapping[str, Any], kept: Container[str]) -> list[tuple[Any, Place]]:
        """What shows one of them below these names. `kept`: those of which nothing goes home; what shows the memory
        itself goes on doing so there."""
        found: dict[int, tuple[Any, Place]] = {}
        for name in sorted(values):
            for tensor in tensors_below([values[name]], lambda value: isinstance(value, torch.Tensor)):
                by_itself = name in kept and not is_stage_tensor(tensor) and noted_of(tensor) is None
                own = self.holds(tensor) or isinstance(tensor, torch.nn.Parameter)
                if not (own or by_itself) and (place := self.by(tensor)) is not None:
                    found[id(tensor)] = tensor, place
        return [*found.values()]

    def holds(self, tensor: Any) -> bool:
        return id(tensor) in self._ids

    def by(self, tensor: Any) -> Place | None:
        """What it shows; None: nothing, or it cannot be told."""
        place = self._of(tensor)
        if place is None or not self.holds(place[0]) or place[0].dtype != tensor.dtype:
            return None
        of, form = place
        return of, None if form == (tuple(of.shape), _strides(of), 0) else form

    def _of(self, tensor: Any) -> Place | None:
        if is_stage_tensor(tensor):
            found: Place | None = self._of_stage(tensor)
            return found
        if self._dtensor is not None and isinstance(tensor, self._dtensor):
            memory, form = self._in_rows(tensor)
            return (self._rows[memory], form) if memory in self._rows else None
        if (noted := noted_of(tensor)) is not None:
            return noted
        memory = memory_of(tensor) if self._plain else None
        inside = self._plain.get(memory_id(memory), ()) if memory is not None else ()
        of = next((one for one in inside if is_part(tensor, one)), None)
        if of is None or not of.is_contiguous():
            return None
        return of, (tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - of.storage_offset())


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()
