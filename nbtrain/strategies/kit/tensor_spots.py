"""pipeline: where a tensor lies that is whole on one rank only, and how its content gets to the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nbtrain.compat import dtensor
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.collective_calls import MEETING
from nbtrain.strategies.kit.owned_tensors import stand_in

ALONE = (
    "Under pipeline a weight, its gradient and its optimizer's state are on one rank, and reading them needs every "
    "rank: write `norm = float(p.norm())`, or `state = model.state_dict()`, on every rank, above `if rank == 0:`. "
    "Under --strategy ddp one rank can do it alone"
)
APART = (
    "the ranks read different weights, or in a different order, which under pipeline they do together: do the same on "
    "every rank, not below `if rank == 0:`; or use --strategy ddp"
)
SPARSE = (
    "a sparse gradient was read or edited, which under pipeline only the rank of its stage has: step the optimizer "
    "with it as it is, let the nn.Embedding have sparse=False, or use --strategy ddp"
)

SPOT = "nbtrain_spot"
"""The attribute of such a tensor that says where it lies."""


class OnOneRank:
    """Marks the classes of tensors that lie on one rank."""

    __slots__ = ()


class StageContext:
    """What the tensors of one component need to know about the cell that runs."""

    tensor_class: ClassVar[type[torch.Tensor]]

    def __init__(self, rank: int, inside: Callable[[], bool], device: torch.device) -> None:
        """`inside`: whether a stage of this rank is running."""
        self.rank, self.inside, self.device = rank, inside, device
        self.open = False
        """a cell runs"""


@dataclass(slots=True, eq=False)
class TensorSpot:
    """The rank on which a tensor lies."""

    context: StageContext
    owner: int
    strides: Any = None
    sparse: bool = False

    @property
    def mine(self) -> bool:
        return self.owner == self.context.rank

    def like(self, strides: Any = None) -> TensorSpot:
        return TensorSpot(self.context, self.owner, strides)


def is_stage_tensor(tensor: Any) -> bool:
    """Whether it lies on one rank, and a cell outside of a stage sees it."""
    return issubclass(type(tensor), OnOneRank)


def spot_of(tensor: torch.Tensor) -> TensorSpot:
    found: TensorSpot = vars(tensor)[SPOT]
    return found


def put(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor:
    """Mark that the tensor lies there."""
    tensor.__class__ = spot.context.tensor_class
    vars(tensor)[SPOT] = spot
    return tensor


def gradient_elsewhere(p: torch.Tensor, context: StageContext, owner: int, sparse: bool = False) -> torch.Tensor:
    """A stand-in for `p.grad`, which is on another rank."""
    found = put(stand_in(p.detach()), TensorSpot(context, owner, sparse=sparse))
    # What code sees that looks for numbers which are not finite, in the part of a gradient that a rank has.
    dtensor.pose_with_local(found, torch.zeros(1, dtype=p.dtype, device=p.device))
    return found


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its content, on every rank, as a part of the graph. Collective."""
    spot = spot_of(tensor)
    if spot.sparse:
        raise NotSupported(SPARSE)
    found = send_to_all(tensor, spot)
    if not spot.mine and tensor.requires_grad and torch.is_grad_enabled():
        found = _Away.apply(torch.zeros((), requires_grad=True), found)
    return found


@torch.no_grad()
def send_to_all(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor:
    """The content of a tensor, from its rank to all. Collective."""
    number = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype, spot.owner)).encode())
    # A rank that waits in another collective knows by the number of elements what this one is doing.
    both = torch.tensor([number, -number, *[0] * (MEETING - 2)], device=spot.context.device)
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise NotSupported(APART)
        if not spot.mine:
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            sent = found
        else:
            found, sent = tensor, tensor.detach().resolve_conj().resolve_neg().contiguous()
        if sent.numel():
            flat = sent.reshape(-1).view(torch.uint8)
            there = flat.to(spot.context.device)
            dist.broadcast(there, spot.owner)
            if there is not flat and not spot.mine:
                flat.copy_(there)
        if not spot.mine and spot.strides is not None and all(spot.strides) and len(spot.strides) == tensor.dim():
            # Laid out as on its rank: what is computed of it is to be the same on all, to the last bit.
            found = torch.empty_strided(found.shape, spot.strides, dtype=found.dtype, device=found.device).copy_(found)
    except NotSupported as error:
        if str(error) == APART:
            raise
        raise NotSupported(f"{error}. {ALONE}") from None
    return found


class _Away(torch.autograd.Function):
    """The content of a tensor of another rank: its gradient is computed there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as an ordinary tensor."""
    return tensor.detach() if is_stage_tensor(tensor) else tensor
