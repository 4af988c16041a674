"""Makes `float(norm)`, `print(norm)`, `if norm > 1` on DTensors give the value over all ranks, while a cell runs.

torch would give each rank what it has itself: of `sum(p.square().sum() for p in model.parameters())` the squares of its
own rows. So, while a cell runs, a number that is asked for is brought together first. That needs every rank, as any
operation on such tensors may: they meet in a reduction of torch.distributed's before, which is watched, so that a rank
that comes alone (`if rank == 0: print(norm)`) is told so and does not wait forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from nbtrain.compat import dtensor
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.replaced_functions import NUMBERS
from nbtrain.strategies.fsdp import mixed_operands
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.collective_calls import MEETING, OTHER_TENSORS
from nbtrain.strategies.kit.row_shards import whole

ALONE = (
    "A number that is made of a model's own parameters or gradients needs every rank, too, under fsdp: write "
    "`norm = float(norm)` on every rank, above `if rank == 0:`"
)
DTENSOR = "torch.distributed.tensor.DTensor"


def on(mesh: DeviceMesh) -> None:
    """A cell is about to run, with tensors in pieces on this mesh, which has all ranks."""
    _while.on(mesh)


def off(mesh: DeviceMesh) -> None:
    """Once for each `on`."""
    _while.off(mesh)
    if not _meshes:
        mixed_operands.forget()


def active() -> bool:
    """Whether a cell runs, with tensors in pieces."""
    return bool(_meshes)


def complete(tensor: DTensor) -> torch.Tensor:
    """The whole, as an ordinary tensor. Collective where this rank has a part only."""
    dtensor_operations.fresh(tensor)
    if all(isinstance(one, Replicate) for one in tensor.placements):
        return dtensor.local(tensor).detach()
    with dtensor_operations.told(tensor):
        return whole(tensor)


def _put(listeners: Listeners) -> None:
    numbers = dtensor.read_numbers_by(complete)
    if numbers is not None:
        listeners.hook(numbers)
    else:  # then at least where Python asks for it
        for name in NUMBERS:
            listeners.listen(f"{DTENSOR}.{name}", "values", lambda old: lambda tensor: old(complete(tensor)))
    dtensor_operations.put(listeners)
    mixed_operands.put(listeners)
    listeners.listen(f"{DTENSOR}.__str__", "values", lambda _: _text)
    listeners.listen(f"{DTENSOR}.__format__", "values", lambda _: _formatted)
    listeners.listen(f"{DTENSOR}._repr_pretty_", "values", lambda _: _shown)
    listeners.listen(dtensor.MOVERS[0], "values", _met)


_while: While[DeviceMesh] = While(_put)
_meshes = _while.owners


def _text(tensor: DTensor) -> str:
    """The full value of scalars only. The text of a larger one says that it is a part; so does `repr`, which tracebacks
    and debuggers call on one rank."""
    return str(complete(tensor)) if tensor.ndim == 0 and not tensor.is_meta else repr(tensor)


def _shown(tensor: DTensor, printer: Any, cycle: bool) -> None:
    """As the last line of a cell. There IPython would swallow the error of a rank that comes alone."""
    if tensor.ndim == 0 and all(isinstance(one, Replicate) for one in tensor.placements):
        printer.text(_text(tensor))
    else:
        printer.text(repr(tensor) + (", this rank's part: print(...) shows the whole" if tensor.ndim == 0 else ""))


def _formatted(tensor: DTensor, form: str) -> str:
    if tensor.ndim == 0 and not tensor.is_meta:
        return format(complete(tensor), form)
    return object.__format__(tensor, form)


def _met(old: Callable[..., Any]) -> Callable[..., Any]:
    def redistribute(tensor: torch.Tensor, now: Any, then: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(now.placements, then.placements, strict=True)
        moves = any(a != b and not isinstance(a, Replicate) for a, b in pairs)
        if moves and type(tensor) is torch.Tensor and now.mesh in _meshes:
            try:
                dist.all_reduce(torch.zeros(MEETING, device=now.mesh.device_type))
            except NotSupported as error:
                raise NotSupported(str(error) if OTHER_TENSORS in str(error) else f"{error}. {ALONE}") from None
        return old(tensor, now, then, *args, **kwargs)

    return redistribute
