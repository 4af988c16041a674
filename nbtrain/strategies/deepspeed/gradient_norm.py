"""The norm of gradients that the engine holds, before it steps them: each rank squares what it keeps of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import deepspeed as ds
from nbtrain.strategies.deepspeed.shares import EngineLayout


def norm_of_pieces(zero: Any, layout: EngineLayout, device: torch.device, arrived: Container[int]) -> torch.Tensor:
    """Stages 2 and 3, where backwards have reduced them. `arrived`: whose, by id. Collective."""
    pieces = [zero.grad_partitions_flat_buffer] if layout.stage == 3 else _kept(zero, layout, arrived)
    square = torch.zeros((), device=device)
    for piece in pieces:
        square += torch.linalg.vector_norm(piece.detach(), dtype=torch.float32).to(device) ** 2
    dist.all_reduce(square)
    return square.sqrt()


def _kept(zero: Any, layout: EngineLayout, arrived: Container[int]) -> Iterator[torch.Tensor]:
    for number, members in enumerate(zero.params_in_partition):
        if ds.is_in_one_piece(zero, number):
            if (group := zero.averaged_gradients.get(number)) is not None:
                yield group.flat_partition
            continue
        for at, p in enumerate(members):
            share = layout.shares[id(p)]
            if zero.cpu_offload:
                if id(p) not in arrived:  # what is there is of an earlier step
                    continue
                flat = zero.accumulated_grads_in_cpu[zero.get_param_id(p)].view(-1)
            else:
                held = zero.all_grad_tensors.get(number)
                if held is None:
                    continue
                flat = held[at].reshape(-1)
            yield flat if flat.numel() < p.numel() else flat[share.start : share.stop]


def norm_of_sum(gradients: Iterable[torch.Tensor], at_once: int) -> torch.Tensor:
    """Stage 1, where each rank still has gradients of its own: their mean is taken of a copy. Collective."""
    square: Any = 0.0
    for batch in _batches(gradients, at_once):
        flat = torch.cat([g.detach().reshape(-1).float() for g in batch])
        dist.all_reduce(flat)
        square = square + torch.linalg.vector_norm(flat / dist.get_world_size()) ** 2
    return torch.as_tensor(square).sqrt()


def _batches(tensors: Iterable[torch.Tensor], at_once: int) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    for tensor in tensors:
        if batch and sum(one.numel() for one in batch) + tensor.numel() > at_once:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch
