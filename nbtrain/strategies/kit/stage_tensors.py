"""Tensors of a component that lie on one rank each: they have a class of their own while a cell runs (stage_tensor.py).

The others have one number in their shape. Inside of a stage they have their plain class, so that all this costs nothing
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.compat import pytree
from nbtrain.compat.tensors import as_plain_tensors, become
from nbtrain.strategies.kit.stage_spot import SPOT, Place, Spot, StageContext, send_to_all, spot_of
from nbtrain.strategies.kit.stage_tensor import StageTensor, full_tensor, is_stage_tensor, plain_of, put


class StageTensors(StageContext):
    """Gives tensors of one component their class while a cell runs, and takes it from them inside of a stage."""

    def __init__(self, rank: int, place: Place, device: torch.device) -> None:
        super().__init__(rank, place, device)
        self._marked: list[tuple[torch.Tensor, Spot]] = []
        self._own: list[torch.Tensor] = []
        """those of them that lie on this rank, and with which a stage computes"""
        self._plain_depth = 0

    def on(self, owned: Iterable[tuple[torch.Tensor, int]]) -> None:
        """`owned`: (tensor, the rank it lies on)."""
        self.off()
        self.open = True
        for tensor, owner in owned:
            if type(tensor) in (torch.Tensor, nn.Parameter):
                self._marked.append((tensor, Spot(self, owner)))
                put(*self._marked[-1])
        self._own = [tensor for tensor, spot in self._marked if spot.mine]

    def off(self) -> None:
        """Not collective. Views and copies that the cell has made keep their class and come home in another way."""
        self.open = False
        self._plain_depth = 0
        for tensor, spot in self._marked:
            if vars(tensor).get(SPOT) is spot:
                del vars(tensor)[SPOT]
                become([tensor])
        self._marked, self._own = [], []

    @contextmanager
    def all_plain(self) -> Iterator[None]:
        """All tensors are ordinary ones inside, also other ranks': fake tensors can be made of ordinary ones only."""
        become([tensor for tensor, _ in self._marked])
        try:
            yield
        finally:
            if self.open:
                become([tensor for tensor, _ in self._marked], StageTensor)
                become(self._own if self._plain_depth else [])

    @contextmanager
    def own_plain(self, more: Callable[[], list[torch.Tensor]] = list) -> Iterator[None]:
        """This rank's tensors are ordinary ones inside. `more`: gives gradients and states to include."""
        also = [tensor for tensor in more() if is_stage_tensor(tensor)]
        self._plain_depth += 1
        become([*also, *self._own])
        try:
            yield
        finally:
            self._plain_depth -= 1
            if self.open:
                become(also if self._plain_depth else [*also, *self._own], StageTensor)


def with_full_stage_tensors(value: Any) -> Any:
    """What a cell is about to save, with whole tensors in the places of those on one rank; the same value if it has
    none. Collective."""
    if not any(map(is_stage_tensor, pytree.tree_leaves(value))):
        return value
    with as_plain_tensors():
        full: dict[int, torch.Tensor] = {}

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if not is_stage_tensor(tensor):
                return tensor
            if id(tensor) not in full:
                full[id(tensor)] = plain_of(full_tensor(tensor)).detach()
            return full[id(tensor)]

        return pytree.tree_map_only(torch.Tensor, taken, value)


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor that every rank has. Collective; the cell may have ended."""
    with as_plain_tensors():
        return plain_of(send_to_all(tensor, spot_of(tensor))).detach().clone()
