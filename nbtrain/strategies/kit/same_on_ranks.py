"""Whether tensors are the same on all ranks: a number of each is compared, and none leaves its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

COLUMNS = 1024
MIX, MIX_AGAIN = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""odd numbers that bits are mixed by"""


def differing(
    tensors: Sequence[torch.Tensor], device: torch.device | str, number: Callable[[torch.Tensor], object] | None = None
) -> list[bool]:
    """For each tensor, whether it differs between ranks. Collective: one small reduction on this device, for as many
    tensors on every rank. `number`: another one than `digest` makes."""
    if not tensors:
        return []
    found = [digest(one) if number is None else number(one) for one in tensors]
    mine = torch.stack([torch.as_tensor(one, dtype=torch.int64, device=device) for one in found])
    both = torch.cat([mine, -mine])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, least = both.chunk(2)
    return [bool(one) for one in (most != -least).tolist()]


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number of its bits, on its device, which changes with each of them and with their places."""
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for sums in bits_summed(tensor):
        found = found * MIX + (sums * _factors(len(sums), sums.device)).sum()
    return found >> 1  # of which there is a negative, too


def bits_summed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sums of its bits by rows and by columns: an edit changes some of them, and so does an exchange."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    there = flat.nbytes | int(flat.storage_offset()) * flat.itemsize  # a slice may begin anywhere
    wide = torch.int32 if there % 4 == 0 else torch.int16 if there % 2 == 0 else torch.uint8
    bits = flat.view(torch.uint8).view(wide)
    whole = bits[: bits.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = bits[whole.numel() :]
    return [whole.sum(0, dtype=torch.int64), whole.sum(1, dtype=torch.int64), rest.to(torch.int64)]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """By place, and in no order that sums could cancel in."""
    at = torch.arange(1, count + 1, device=device) * MIX
    at = (at ^ (at >> 31)) * MIX_AGAIN
    return (at ^ (at >> 29)) | 1
