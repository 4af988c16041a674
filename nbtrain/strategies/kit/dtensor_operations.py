"""Tensors in pieces while a cell runs: put together, written back, given other memory; copies that stand for views.

Whatever torch does not compute by pieces is computed on the whole, by every rank alike, and each rank takes its part of
what was written (`fsdp/piece_functions.py`). A view of the whole (`r = w.data[1]`) is a copy then. It goes on showing
the tensor: what is written to it is written to the tensor, and who reads it after something was written has it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from nbtrain.base.errors import NotSupported
from nbtrain.compat import fsdp2
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.tensors import memory_id
from nbtrain.strategies.kit import collective_calls, functional_transforms
from nbtrain.strategies.kit.collective_calls import MEETING, OTHER_TENSORS
from nbtrain.strategies.kit.written_numbers import MADE_BY

ALONE = (
    "A number that is made of a model's own parameters or gradients needs every rank, too, under fsdp: write "
    "`norm = p.norm()` on every rank, above `if rank == 0:`"
)


# --- the whole and its parts -----------------------------------------------------------------------


@torch.inference_mode(False)  # in which torch makes no `detach()` of a DTensor; and the whole has a version
def full_tensor(tensor: DTensor) -> torch.Tensor:
    """The whole as an ordinary tensor, not to be written to. Collective where this rank has a part only; they meet in
    a collective that is watched, so that a rank that comes alone is told so, and does not wait forever."""
    functional_transforms.refuse_traced(tensor)
    if is_copy(tensor):
        _refresh(tensor)
        return local_part(tensor).detach()
    plain: Any = tensor.detach()
    here = local_part(plain)
    if all(isinstance(placement, Replicate) for placement in plain.placements):
        return here
    with told(tensor):
        try:
            dist.all_reduce(torch.zeros(MEETING, device=plain.device_mesh.device_type))
        except NotSupported as error:
            raise NotSupported(str(error) if OTHER_TENSORS in str(error) else f"{error}. {ALONE}") from None
        there = here.to(plain.device_mesh.device_type)  # rows that were offloaded cannot be sent
        full: torch.Tensor = DTensor.from_local(
            there, plain.device_mesh, plain.placements, run_check=False, shape=plain.shape, stride=plain.stride()
        ).full_tensor()
    laid_out = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=here.device)
    return laid_out.copy_(full)


def replicated(full: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that is the same on all ranks, as a DTensor on the mesh of `like`."""
    return DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


@torch.no_grad()
def write(tensor: DTensor, full: torch.Tensor) -> None:
    """Write this rank's part of new values; of a copy, to what it shows, too. Collective only for a copy."""
    if (shown := vars(tensor).get(SHOWS)) is None:
        there = replicated(full.to(tensor.device_mesh.device_type), tensor)
        local_part(tensor).copy_(local_part(there.redistribute(placements=tensor.placements)))
        return
    local_part(tensor).copy_(full)
    over = full_tensor(shown.origin)
    shown.of(over).copy_(local_part(tensor))
    write(shown.origin, over)
    shown.stood = counts[:]


# --- copies that stand for views -------------------------------------------------------------------

SHOWS = "_nbtrain_shows"
"""the attribute of a copy"""
copies_made: list[bool] = []
"""Whether there are any: until then nobody looks for them."""


@dataclass(slots=True, eq=False)
class _Shown:
    """What a copy is a view of."""

    origin: DTensor
    """has the memory that was shown, also if `p.data = other` gives the parameter another"""
    of: Callable[[torch.Tensor], torch.Tensor]
    """the view, of the origin's whole"""
    stood: list[int]
    """`counts` when it was last as the origin is"""


def begin() -> None:
    """A cell begins."""
    copies_made.clear()


def is_copy(tensor: Any) -> bool:
    return bool(copies_made) and SHOWS in vars(tensor)


def show(tensor: DTensor, of: Callable[[torch.Tensor], Any], full: torch.Tensor) -> Any:
    """`of(whole)`, the whole of this tensor: where it is a view there, copies that stand for it."""
    origin = DTensor.from_local(
        local_part(tensor).detach(), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip
    vars(origin).update(vars(tensor))
    memory = full.untyped_storage().data_ptr()

    def stand_in(part: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if isinstance(part, DTensor) or part.untyped_storage().data_ptr() != memory:
            return part  # another's, or new
        copy = replicated(part, tensor)
        vars(copy)[SHOWS] = _Shown(origin, of, counts[:])
        if made := vars(tensor).get(MADE_BY):
            vars(copy)[MADE_BY] = made
        copies_made[:] = [True]
        return copy

    shown = of(full)
    if isinstance(shown, torch.Tensor):
        return stand_in(shown, of)
    return type(shown)(stand_in(part, _number(of, i)) for i, part in enumerate(shown))


def _number(of: Callable[[torch.Tensor], Any], i: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda over: of(over)[i]


def shown_by(tensor: DTensor) -> tuple[int, tuple[Any, ...]]:
    """Which memory it shows, by the number of this rank's part, and its size, strides and offset in the whole."""
    memory, image = _image(tensor)
    return memory, (tuple(image.shape), image.stride(), image.storage_offset())


def _image(tensor: DTensor) -> tuple[int, torch.Tensor]:
    if (shown := vars(tensor).get(SHOWS)) is not None:
        memory, image = _image(shown.origin)
        return memory, shown.of(image)
    image = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return memory_id(local_part(tensor).untyped_storage()), image


@torch.no_grad()
def _refresh(copy: DTensor) -> None:
    """Read it anew. Collective where its origin may have been written to since."""
    shown = vars(copy)[SHOWS]
    if shown.stood != counts:
        local_part(copy).copy_(shown.of(full_tensor(shown.origin)))
        shown.stood = counts[:]


def fresh(tensor: DTensor) -> None:
    """Called before a tensor is read otherwise than by a function of torch."""
    if is_copy(tensor):
        _refresh(tensor)


# --- what is told apart ----------------------------------------------------------------------------

counts = [0, 0]
"""How often at most tensors in pieces were written to; and how often gradients were, by a backward or by clipping."""
thawed = [0]
"""How often a weight in pieces was frozen or thawed: then ranks compare, before a backward, which of them train."""


def give_name(p: DTensor, name: str) -> None:
    """What is made of this weight is known as its. The name is the same on all ranks."""
    vars(p)[MADE_BY] = collective_calls.subject_of_weight(name)


def forget_name(p: DTensor) -> None:
    vars(p).pop(MADE_BY, None)


def told(tensor: DTensor) -> AbstractContextManager[None]:
    """Around what brings the ranks' parts together: they compare whether it is the same tensor, of the same numbers."""
    return collective_calls.told(abs(vars(tensor).get(MADE_BY, 0)))


# --- memory that is left ---------------------------------------------------------------------------

_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""id of a parameter → what torch gathers of it. No weak reference to the parameter itself: torch refuses to swap a
tensor that has one, and so moves a model in pieces (`model.to`)."""


def know(weight: Any) -> None:
    """Remember a weight of fully_shard's, so that `give` can give it memory."""
    _weights[id(fsdp2.sharded(weight))] = weight


@torch.no_grad()
def give(tensor: DTensor, part: torch.Tensor) -> None:
    """Make `part` this rank's part, the very memory. Who holds the part that the tensor had keeps it."""
    counts[0] += 1
    mine = local_part(tensor)
    if part.device != mine.device or part.stride() != mine.stride() or type(part) is not type(mine):
        part = torch.empty_like(mine).copy_(part)
    vars(tensor).pop(SHOWS, None)
    weight = _weights.get(id(tensor))
    if weight is None or fsdp2.sharded(weight) is not tensor:
        mine.data = part
    else:
        fsdp2.give_memory(weight, part)
