"""Tensors of which every rank keeps some rows: cuts them, describes them, makes them whole.

They are DTensors over a mesh of one dimension, or of two, the first of which repeats what the second divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbtrain.compat import modules as torch_modules
from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.base import Piece
from nbtrain.strategies.kit.component_tensors import parameters_of
from nbtrain.strategies.kit.dtensor_operations import fresh
from nbtrain.strategies.kit.written_numbers import wrote_whole

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def rows(tensor: DTensor) -> tuple[int, int]:
    """(start, stop) of the rows on this rank. They are dealt out as by `torch.chunk`: the last ranks may have none."""
    mesh, total = tensor.device_mesh, tensor.shape[0]
    size = -(-total // mesh.size(mesh.ndim - 1))
    start = min(_place(mesh, mesh.ndim - 1) * size, total)
    return start, min(start + size, total)


def _place(mesh: DeviceMesh, dim: int) -> int:
    """This rank's coordinate. `get_local_rank` would ask a process group that may be gone."""
    at = mesh.get_coordinate()
    assert at is not None
    return at[dim]


def by_rows(tensor: DTensor) -> bool:
    """Whether it is divided as `rows` says. A transposed one is not, nor is a sum of which every rank has a summand."""
    *outer, last = tensor.placements
    if type(last) is not Shard or last.dim != 0 or not all(isinstance(placement, Replicate) for placement in outer):
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
    def fill(self, full: torch.Tensor) -> None:
        if self.stop > self.start:
            self.local.copy_(full.detach().reshape(self.shape)[self.start : self.stop])


def cut(like: DTensor, full: torch.Tensor) -> DTensor:
    """This rank's rows of a tensor that it has whole, laid out as `like` is. Nothing is communicated."""
    start, stop = rows(like)
    local = full.detach()[start:stop].to(local_part(like).device, copy=True).contiguous()
    return from_local(like, local, full.shape)


def from_local(like: DTensor, local: torch.Tensor, shape: torch.Size) -> DTensor:
    """The tensor of this shape of which these are the rank's rows, laid out as `like` is."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)


@torch.no_grad()
def whole(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, on every rank, on the device of the rows. Collective."""
    fresh(tensor)
    local = local_part(tensor)
    there = local.to(tensor.device_mesh.device_type)  # rows that were offloaded cannot be sent from the CPU
    full = from_local(tensor, there.detach(), tensor.shape).full_tensor()
    return full.to(local.device)


def fresh_storage(tensor: DTensor, device: torch.device) -> DTensor:
    """A tensor of the same rows that has memory, for one on the device meta."""
    return from_local(tensor, torch.empty_like(local_part(tensor), device=device), tensor.shape)


def as_parameter(tensor: torch.Tensor, old: torch.Tensor) -> nn.Parameter:
    """A parameter in the place of `old`, with the attributes that somebody has put on it."""
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def places(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """(module, name, parameter) for each place where a parameter is."""
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
    Returns (old, new) of what was replaced in its state."""
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
        for holder, name, value in held_tensors(state):
            if value.shape == key.shape and value.ndim:
                holder[name] = convert(target, value)
                if holder[name] is not value:
                    replaced.append((value, holder[name]))
    return replaced


def held_tensors(state: Any) -> list[tuple[Any, Any, torch.Tensor]]:
    """(dict or list, key or place, tensor) for each tensor in a parameter's state, in an order that ranks share."""
    tensors: list[tuple[Any, Any, torch.Tensor]] = []
    if isinstance(state, dict | list):
        for key in sorted(state, key=str) if isinstance(state, dict) else range(len(state)):
            value = state[key]
            tensors += [(state, key, value)] if isinstance(value, torch.Tensor) else held_tensors(value)
    return tensors


def cut_state(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a state tensor that has the parameter's shape."""
    if isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    if value.is_meta:
        return fresh_storage(cut(parameter, value), local_part(parameter).device)
    return cut(parameter, value)


def cut_what_is_loaded(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Cut the state after each `load_state_dict` of a whole one. Torch takes over the very tensors of the dict that it
    is given, so those are the state's in there, too. Returns handles of hooks."""
    given: list[Any] = []

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        wrote_whole(value for state in optimizer.state.values() for value in state.values())
        pieces: dict[int, torch.Tensor] = {id(p): p for p in parameters_of(optimizer) if isinstance(p, DTensor)}
        replaced = rebind(optimizer, pieces, cut_state)
        new = {id(old): piece for old, piece in replaced}
        for holder, key, value in held_tensors(given.pop().get("state") if given else None):
            holder[key] = new.get(id(value), value)

    return [
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: given.__setitem__(slice(None), [state_dict])),
        optimizer.register_load_state_dict_post_hook(loaded),
    ]


@torch.no_grad()
def to_one(tensor: DTensor, to: int) -> torch.Tensor | None:
    """The whole tensor in the main memory of rank `to`; None on the others, which never have it. Collective."""
    if not by_rows(tensor):  # a norm, or a weight that was transposed
        full = whole(tensor)
        return full.cpu() if dist.get_rank() == to else None
    mesh = tensor.device_mesh
    last = mesh.ndim - 1
    group = mesh.get_group(last)
    if to not in dist.get_process_group_ranks(group):  # of several that keep the same, its own speaks
        return None
    start, stop = rows(tensor)
    size = -(-tensor.shape[0] // mesh.size(last))
    mine = local_part(tensor).detach().to(mesh.device_type)
    if stop - start < size:  # pieces of one size are sent
        padded = mine.new_zeros((size, *tensor.shape[1:]))
        padded[: stop - start] = mine
        mine = padded
    parts = [torch.empty_like(mine) for _ in range(mesh.size(last))] if dist.get_rank() == to else None
    dist.gather(mine.contiguous(), parts, dst=to, group=group)
    return None if parts is None else torch.cat(parts)[: tensor.shape[0]].cpu()
