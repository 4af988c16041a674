"""Where a tensor of a stage lies, and how its content goes to every rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.kit.collective_calls import MEETING

ALONE = (
    "Under pipeline a weight, its gradient and its optimizer's state are on one rank, and reading them needs every "
    "rank: write `norm = float(p.norm())`, or `state = model.state_dict()`, on every rank, above `if rank == 0:`. "
    "Under --strategy ddp one rank can do it alone"
)


APART = (
    "the ranks read different weights, or in a different order, which under pipeline they do together: do the same on "
    "every rank, not below `if rank == 0:`; or use --strategy ddp"
)


SWAPPED = (
    "a weight was exchanged with another tensor (torch.utils.swap_tensors), and under pipeline it is that of a stage: "
    "exchange what they contain: `with whole(model): was = p.detach().clone(); p.data.copy_(q); q.data.copy_(was)`"
)


SPOT = "nbtrain_spot"
"""The attribute of such a tensor that says where it lies."""


class Place(Protocol):
    """What is under way on this rank."""

    inside: bool
    """a stage computes"""
    everywhere: bool
    """every rank computes all of a model"""


class StageContext:
    """What the tensors of one component need to know about the cell that runs."""

    def __init__(self, rank: int, place: Place, device: torch.device) -> None:
        self.rank, self.place, self.device = rank, place, device
        self.open = False
        """a cell runs"""


@dataclass(slots=True, eq=False)
class Spot:
    """Where a tensor lies."""

    of: StageContext
    owner: int
    strides: Any = None
    """of a view that is not contiguous"""
    sparse: bool = False
    base: torch.Tensor | None = None
    """what it is a view of"""
    offset: int = 0
    """of a view: where it begins in its base's memory"""
    memory: object = field(default_factory=object)
    """the same one for what shows the same memory"""
    of_base: Spot | None = None

    @property
    def mine(self) -> bool:
        return self.owner == self.of.rank


def spot_of(tensor: torch.Tensor) -> Spot:
    spot: Spot | None = vars(tensor).get(SPOT)
    if spot is None:
        raise NotSupported(SWAPPED)
    return spot


@torch.no_grad()
def send_to_all(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    number = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype, spot.owner)).encode())
    # A rank that waits in another collective knows by the number of elements what this one is doing.
    both = torch.tensor([number, -number, *[0] * (MEETING - 2)], device=spot.of.device)
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise NotSupported(APART)
        if not spot.mine:
            received = sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        else:
            received, sent = tensor, tensor.detach().resolve_conj().resolve_neg().contiguous()
        if sent.numel():
            flat = sent.reshape(-1).view(torch.uint8)
            there = flat.to(spot.of.device)
            dist.broadcast(there, spot.owner)
            if there is not flat and not spot.mine:
                flat.copy_(there)
        if not spot.mine and spot.strides is not None and all(spot.strides):
            # Laid out as on its rank: what is computed of it is to be the same on all, to the last bit.
            received = torch.empty_strided(
                received.shape, spot.strides, dtype=received.dtype, device=received.device
            ).copy_(received)
    except NotSupported as error:
        if str(error) == APART:
            raise
        raise NotSupported(f"{error}. {ALONE}") from None
    return received
