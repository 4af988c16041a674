"""Tensors of which every rank keeps some rows: cutting them, describing them, making them whole.

They are DTensors over a mesh of one dimension, or of two, the first of which repeats what the second divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbtrain.compat import modules as torch_modules
from nbtrain.compat.dtensor import local as local_part
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Piece
from nbtrain.strategies.kit.tensor_views import fresh

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Places = list[tuple[nn.Module, str, torch.Tensor]]
"""(module, name, parameter)"""


def rows(tensor: DTensor) -> tuple[int, int]:
    """Which rows of the whole are here: as `torch.chunk` deals them out, the last ranks may have none."""
    mesh, total = tensor.device_mesh, tensor.shape[0]
    size = -(-total // mesh.size(mesh.ndim - 1))
    start = min(_place(mesh, mesh.ndim - 1) * size, total)
    return start, min(start + size, total)


def _place(mesh: DeviceMesh, dim: int) -> int:
    """This rank's; the mesh itself would ask a process group that may be gone."""
    at = mesh.get_coordinate()
    assert at is not None
    return at[dim]


def by_rows(tensor: DTensor) -> bool:
    """Whether it is divided as `rows` says; a transposed one is not, nor is a sum of which every rank has a part."""
    *outer, last = tensor.placements
    if type(last) is not Shard or last.dim != 0 or not all(isinstance(one, Replicate) for one in outer):
        return False
    start, stop = rows(tensor)
    return local_part(tensor).shape == (stop - start, *tensor.shape[1:])


class RowShards(Piece):
    """What a rank keeps of a tensor that is divided by rows."""

    def __init__(self, tensor: DTensor) -> None:
        self.local = local_part(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.start, self.stop = rows(tensor)
        self.width = tensor.shape[1:].numel()
        mesh = tensor.device_mesh
        self.speaks = self.stop > self.start and self.width > 0 and (mesh.ndim == 1 or _place(mesh, 0) == 0)

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(self.start * self.width, self.stop * self.width)] if self.speaks else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self.local.detach().reshape(-1)] if self.speaks else []

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        if self.stop > self.start:
            self.local.copy_(whole.detach().reshape(self.shape)[self.start : self.stop])


def cut(like: DTensor, whole: torch.Tensor) -> DTensor:
    """This rank's rows of a tensor that it has whole, laid out as `like` is. Nothing is communicated."""
    start, stop = rows(like)
    local = whole.detach()[start:stop].to(local_part(like).device, copy=True).contiguous()
    return _from_local(like, local, whole.shape)


def _from_local(like: DTensor, local: torch.Tensor, shape: torch.Size) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)


@torch.no_grad()
def whole(tensor: DTensor) -> torch.Tensor:
    """All of it, on every rank and where the rows are. Collective."""
    fresh(tensor)
    local = local_part(tensor)
    there = local.to(tensor.device_mesh.device_type)  # rows that were offloaded cannot be sent from the CPU
    full = _from_local(tensor, there.detach(), tensor.shape).full_tensor()
    return full.to(local.device)


def fresh_storage(tensor: DTensor, device: torch.device) -> DTensor:
    """The same rows with memory behind them, of a tensor that has none yet."""
    return _from_local(tensor, torch.empty_like(local_part(tensor), device=device), tensor.shape)


def as_parameter(tensor: torch.Tensor, old: torch.Tensor) -> nn.Parameter:
    """In the place of `old`, with the marks that somebody has put on it."""
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def places(modules: Iterable[nn.Module]) -> Places:
    """Where parameters are, one entry for each place."""
    parts = {id(part): part for module in modules for part in module.modules()}
    return [
        (part, name, p)
        for part in parts.values()
        for name, p in torch_modules.parameters(part).items()
        if p is not None
    ]


def rebind(optimizer: torch.optim.Optimizer, new: dict[int, torch.Tensor], convert: Any) -> Pairs:
    """Have an optimizer hold other parameters, in place: its groups, their lists and the state of each parameter stay
    the objects they are. `convert(parameter, tensor)`: what becomes of a state tensor of the parameter's shape.
    Returns what was replaced in its state."""
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(p), p) for p in group["params"]]
    replaced: Pairs = []
    items = list(optimizer.state.items())
    if any(id(key) in new for key, _ in items):
        optimizer.state.clear()
        for key, state in items:
            optimizer.state[new.get(id(key), key)] = state
    for key, state in items:
        target = new.get(id(key))
        if target is None or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == key.shape and value.ndim:
                state[name] = convert(target, value)
                replaced.append((value, state[name]))
    return replaced


def refuse_odd_state(optimizer: torch.optim.Optimizer, strategy: str, can: str) -> None:
    """An optimizer whose state cannot be divided by rows."""
    name = type(optimizer).__name__
    torn = f"{name} cannot be used under {strategy}, which divides parameters by rows"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotSupported(f"{torn}: it works on one vector of all parameters. Under {can} it works")
    if isinstance(optimizer, torch.optim.Rprop | getattr(torch.optim, "Adafactor", torch.optim.LBFGS)):
        raise NotSupported(f"{torn}: its rule needs whole rows and columns, or writes by index. Under {can} it works")
    for p, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != p.shape and p.ndim:
                raise NotSupported(
                    f"{torn}: its state {key!r} has the shape {tuple(value.shape)} where the parameter has "
                    f"{tuple(p.shape)}. Under {can} it works"
                )
