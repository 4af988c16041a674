"""What a cell reads out of tensors in pieces is the whole's value: `float(norm)`, `print(norm)`, `if norm > 1`.

torch would give each rank what it has itself: of `sum(p.square().sum() for p in model.parameters())` the squares of its
own rows. So, while a cell runs, a number that is asked for is brought together first. That needs every rank, as any
operation on such tensors may: they meet in a reduction of torch.distributed's before, which is watched, so that a rank
that comes alone (`if rank == 0: print(norm)`) is told so and does not wait for ever.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from nbtrain.compat import dtensor
from nbtrain.errors import NotSupported
from nbtrain.strategies.alongside import ODD
from nbtrain.strategies.shards import whole

ALONE = (
    "A number that is made of a model's own parameters or gradients needs every rank, too, under fsdp: write "
    "`norm = float(norm)` on every rank, above `if rank == 0:`"
)
NUMBERS = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__")

_meshes: list[DeviceMesh] = []
_undo: list[Callable[[], None]] = []


def on(mesh: DeviceMesh) -> None:
    """A cell is about to run, with tensors in pieces on this mesh. All ranks are in it."""
    if not _meshes:
        _patch()
    _meshes.append(mesh)


def off(mesh: DeviceMesh) -> None:
    """For each `on`."""
    _meshes.remove(mesh)
    while _undo and not _meshes:
        _undo.pop()()


def active() -> bool:
    """A cell runs, with tensors in pieces."""
    return bool(_meshes)


def complete(tensor: DTensor) -> torch.Tensor:
    """The whole, as an ordinary tensor. Collective where this rank has a part only."""
    if all(isinstance(one, Replicate) for one in tensor.placements):
        return dtensor.local(tensor).detach()
    return whole(tensor)


def _patch() -> None:
    undo = dtensor.read_numbers_by(complete)
    if undo is not None:
        _undo.append(undo)
    else:  # then at least where Python asks for it
        for name in NUMBERS:
            _put(DTensor, name, _number(getattr(torch.Tensor, name)))
    _put(DTensor, "__str__", _text)
    _put(DTensor, "__format__", _formatted)
    _put(DTensor, "_repr_pretty_", _shown)
    for path in dtensor.movers():
        place, _, name = path.rpartition(".")
        _put(sys.modules[place], name, _met(getattr(sys.modules[place], name)))


def _put(owner: Any, name: str, new: Any) -> None:
    before = vars(owner).get(name)
    setattr(owner, name, new)
    _undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))


def _number(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor: old(complete(tensor))


def _text(tensor: DTensor) -> str:
    """Of numbers only: what is shown of larger ones says itself that it is a part, and so does `repr`, which tracebacks
    and debuggers call on one rank."""
    return str(complete(tensor)) if tensor.ndim == 0 and not tensor.is_meta else repr(tensor)


def _shown(tensor: DTensor, printer: Any, cycle: bool) -> None:
    """As the last line of a cell, where IPython would swallow what a rank that comes alone is told."""
    if tensor.ndim == 0 and all(isinstance(one, Replicate) for one in tensor.placements):
        printer.text(_text(tensor))
    else:
        printer.text(repr(tensor) + (", this rank's part: print(...) shows the whole" if tensor.ndim == 0 else ""))


def _formatted(tensor: DTensor, form: str) -> str:
    if tensor.ndim == 0 and not tensor.is_meta:
        return format(complete(tensor), form)
    return object.__format__(tensor, form)


def _met(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def redistribute(tensor: torch.Tensor, now: Any, then: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(now.placements, then.placements, strict=True)
        moves = any(a != b and not isinstance(a, Replicate) for a, b in pairs)
        if moves and type(tensor) is torch.Tensor and now.mesh in _meshes:
            try:
                dist.all_reduce(torch.zeros(ODD, device=now.mesh.device_type))
            except NotSupported as error:
                raise NotSupported(f"{error}. {ALONE}") from None
        return old(tensor, now, then, *args, **kwargs)

    return redistribute
