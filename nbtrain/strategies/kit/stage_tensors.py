"""Tensors that lie whole on one rank, and that a cell reads and writes as if they lay on all.

Under `pipeline` a weight, its gradient and what an optimizer remembers of it are on the rank of their stage; the others
have one number in their shape. All ranks run the same cell, so whatever it does with such a tensor outside of a stage,
it does on every rank at the same place: what is read is sent by its rank to all, what is written is written where it
lies, and what is only asked for its form is answered as it is. A view (`p.data`, `p[0]`, an entry of a `state_dict()`)
lies where its tensor does, and goes on showing it (stage_tensor_functions.py).

For that the tensors have a class of their own while a cell runs, and their plain one inside of a stage, where all this
costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.compat import pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.stage_tensor_functions import call
from nbtrain.strategies.kit.tensor_spots import (
    SPOT,
    OnOneRank,
    StageContext,
    TensorSpot,
    full_tensor,
    is_stage_tensor,
    plain_of,
    send_to_all,
    spot_of,
)

OVER = "it lies on one rank of a cell that has ended"


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with tensors.as_plain_tensors():
        return call(func, args, kwargs or {})


class _StageTensor(OnOneRank):
    """The methods of a tensor that lies on one rank."""

    __torch_function__ = classmethod(_torch_function)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with tensors.as_plain_tensors():
                copied = full_tensor(self).detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            elif self.requires_grad and self.is_leaf:
                copied.requires_grad_()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self: Any, version: Any) -> Any:
        if not spot_of(self).context.open:
            raise NotSupported(OVER)
        return copy.deepcopy(self).__reduce_ex__(version)

    def __str__(self: Any) -> str:
        with tensors.as_plain_tensors():
            return str(plain_of(full_tensor(self)))

    def __repr__(self: Any, **_: Any) -> str:
        """Tracebacks and debuggers call it on one rank."""
        where = "this rank" if spot_of(self).mine else f"rank {spot_of(self).owner}"
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"<{kind} of the shape {tuple(self.shape)} on {where}: print(...) shows it>"

    def _repr_pretty_(self: Any, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __iter__(self: Any) -> Iterator[Any]:
        return iter(self.unbind(0))


class StageTensor(_StageTensor, torch.Tensor):  # type: ignore[misc]  # its methods take other arguments than torch's
    """A tensor on one rank."""


class StageParameter(_StageTensor, nn.Parameter):  # type: ignore[misc]  # its methods take other arguments than torch's
    """A parameter on one rank."""


STAGE_CLASSES: dict[type, type] = {torch.Tensor: StageTensor, nn.Parameter: StageParameter}
PLAIN_CLASSES = {stage: plain for plain, stage in STAGE_CLASSES.items()}


def _change(tensors: Iterable[torch.Tensor], classes: dict[type, type]) -> None:
    for tensor in tensors:
        tensor.__class__ = classes.get(type(tensor), type(tensor))


class StageTensors(StageContext):
    """Gives tensors of one component their class while a cell runs, and takes it from them inside of a stage."""

    tensor_class = StageTensor

    def __init__(self, rank: int, inside: Callable[[], bool], device: torch.device) -> None:
        super().__init__(rank, inside, device)
        self._marked: list[tuple[torch.Tensor, TensorSpot]] = []
        self._own: list[torch.Tensor] = []
        """those of them that lie on this rank, and with which a stage computes"""
        self._plain_depth = 0

    def on(self, owned: Iterable[tuple[torch.Tensor, int, Any]]) -> None:
        """`owned`: (tensor, the rank it lies on, its strides there where it is not contiguous)."""
        self.off()
        self.open = True
        self.add(owned, lasting=True)

    def add(self, owned: Iterable[tuple[torch.Tensor, int, Any]], lasting: bool = False) -> None:
        """`owned`: as for `on`. `lasting`: a stage computes with them."""
        for tensor, owner, strides in owned:
            if type(tensor) not in STAGE_CLASSES:
                continue
            spot = vars(tensor)[SPOT] = TensorSpot(self, owner, strides)
            self._marked.append((tensor, spot))
            if lasting and owner == self.rank:
                self._own.append(tensor)
                if self._plain_depth:
                    continue
            _change([tensor], STAGE_CLASSES)

    def off(self, known: Container[int] | None = None) -> None:
        """Not collective. Views and copies that the cell has made keep their class and come home in another way; so do
        states that are in no optimizer any more. `known`: ids of what the component has; None: all of it."""
        self.open = False
        self._plain_depth = 0
        for tensor, spot in self._marked:
            if vars(tensor).get(SPOT) is not spot:
                continue
            if known is not None and id(tensor) not in known:
                _change([tensor], STAGE_CLASSES)
            else:
                del vars(tensor)[SPOT]
                _change([tensor], PLAIN_CLASSES)
        self._marked, self._own = [], []

    @contextmanager
    def all_plain(self) -> Iterator[None]:
        """All tensors are ordinary ones inside, also other ranks': fake tensors can be made of ordinary ones only."""
        _change((tensor for tensor, _ in self._marked), PLAIN_CLASSES)
        try:
            yield
        finally:
            plain_now = {id(tensor) for tensor in self._own} if self._plain_depth else set()
            if self.open:
                _change((tensor for tensor, _ in self._marked if id(tensor) not in plain_now), STAGE_CLASSES)

    @contextmanager
    def own_plain(self, more: Callable[[], list[torch.Tensor]] = list) -> Iterator[None]:
        """This rank's tensors are ordinary ones inside. `more`: gives gradients and states to include."""
        also = [tensor for tensor in more() if is_stage_tensor(tensor)]
        self._plain_depth += 1
        if self._plain_depth == 1:
            _change(self._own, PLAIN_CLASSES)
        _change(also, PLAIN_CLASSES)
        try:
            yield
        finally:
            self._plain_depth -= 1
            if self.open:
                _change(also if self._plain_depth else (*self._own, *also), STAGE_CLASSES)


def gathered(value: Any) -> Any:
    """What a cell is about to save, with whole tensors in the places of those on one rank; the same value if it has
    none. Collective."""
    if not any(map(is_stage_tensor, pytree.tree_leaves(value))):
        return value
    with tensors.as_plain_tensors():
        whole: dict[int, torch.Tensor] = {}

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if not is_stage_tensor(tensor):
                return tensor
            if id(tensor) not in whole:
                whole[id(tensor)] = plain_of(full_tensor(tensor)).detach()
            return whole[id(tensor)]

        return pytree.tree_map_only(torch.Tensor, taken, value)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor that every rank has. Collective; the cell may have ended."""
    with tensors.as_plain_tensors():
        return plain_of(send_to_all(tensor, spot_of(tensor))).detach().clone()
