"""Whether tensors are the same on all ranks: a number of each is compared, and none leaves its device. By `digest` to
the bit; by norms and signed sums, apart from what machines of several kinds round differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from nbtrain.compat.tensors import norms

COLUMNS = 1024
MIX, MIX_AGAIN = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""odd numbers that bits are mixed by"""
ROUNDING = 1e-5
"""the share of a norm in float32 that is rounding; in halves it is two of their last digits"""
OF_SUMS = 4
"""the same of a signed sum, of which rounding is a random walk: so many times as much"""
NONE, NAN = -2.0, -1.0
"""what stands for a norm where a rank has no tensor, and for one that is no number"""


def differing(
    tensors: Sequence[torch.Tensor], device: torch.device | str, number: Callable[[torch.Tensor], object] | None = None
) -> list[bool]:
    """For each tensor, whether it differs between ranks. Collective: one small reduction on this device, for as many
    tensors on every rank. `number`: another one than `digest` makes."""
    if not tensors:
        return []
    numbers = [digest(tensor) if number is None else number(tensor) for tensor in tensors]
    mine = torch.stack([torch.as_tensor(number_of, dtype=torch.int64, device=device) for number_of in numbers])
    both = torch.cat([mine, -mine])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, least = both.chunk(2)
    return [bool(differs) for differs in (most != -least).tolist()]


@torch.no_grad()
def far_apart(kinds: Mapping[str, Sequence[torch.Tensor | None]], device: torch.device) -> list[str]:
    """The kinds of which a tensor differs between ranks that have it by more than rounding. Collective: one small
    reduction on this device, for as many places on every rank."""
    every = [tensor for some in kinds.values() for tensor in some]
    dense = {i: tensor for i, tensor in enumerate(every) if tensor is not None and _has_a_norm(tensor)}
    found = torch.full((2, len(every)), NONE, device=device)  # norms, and sums, which see a sign
    share = torch.full((2, len(every)), ROUNDING)
    if dense:
        shares = torch.tensor([max(ROUNDING, 2 * torch.finfo(tensor.dtype).eps) for tensor in dense.values()])
        share[:, [*dense]] = torch.stack([shares, OF_SUMS * shares])
        numbers = [*norms([*dense.values()], 2), *map(_signed_sum, dense.values())]
        found[:, [*dense]] = torch.stack([number.to(device, torch.float32) for number in numbers]).view(2, -1)
    there = found[0] != NONE
    found[0].nan_to_num_(NAN)
    found[1].nan_to_num_(0)
    told = torch.cat([found, -found]).masked_fill_(~there, -torch.inf)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    most, least = told.cpu().chunk(2)
    far = iter((most + least > share * most[0].abs()).any(0).tolist())
    return [kind for kind, some in kinds.items() if any(list(islice(far, len(some))))]


def _signed_sum(tensor: torch.Tensor) -> torch.Tensor:
    """With signs by row and column that are the same on all ranks: what each number is rounded by adds up to a share of
    the norm then, whatever the numbers are, and a sign that a rank has changed does not."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    wide, columns = torch.promote_types(flat.dtype, torch.float32), _signs(COLUMNS, flat)
    rows = len(flat) // COLUMNS
    table, rest = flat[: rows * COLUMNS].view(rows, COLUMNS), flat[rows * COLUMNS :]
    sums = torch.cat([(table * columns).sum(1, dtype=wide), (rest * columns[: len(rest)]).sum(0, True, dtype=wide)])
    return (sums * _signs(len(sums), sums)).sum()


def _signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """1 and -1, in no order, of its dtype."""
    return ((_factors(count, like.device) >> 1) & 1).mul_(2).sub_(1).to(like.dtype)


def _has_a_norm(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number of its bits, on its device, which changes with each of them and with their places."""
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for sums in bits_summed(tensor):
        digest = digest * MIX + (sums * _factors(len(sums), sums.device)).sum()
    return digest >> 1  # of which there is a negative, too


def bits_summed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sums of its bits by rows and by columns: an edit changes some of them, and so does an exchange."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    there = flat.nbytes | int(flat.storage_offset()) * flat.itemsize  # a slice may begin anywhere
    wide = torch.int32 if there % 4 == 0 else torch.int16 if there % 2 == 0 else torch.uint8
    bits = flat.view(torch.uint8).view(wide)
    table = bits[: bits.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = bits[table.numel() :]
    return [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest.to(torch.int64)]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """By place, and in no order that sums could cancel in."""
    at = torch.arange(1, count + 1, device=device) * MIX
    at = (at ^ (at >> 31)) * MIX_AGAIN
    return (at ^ (at >> 29)) | 1
