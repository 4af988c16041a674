"""What a batch is made of: tensors, at whatever depth of tuples, lists and dicts they lie, a row for each sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`; containers and named tuples keep their types."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else rebuilt(batch, moved)
    if isinstance(batch, tuple):
        parts = [move(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else rebuilt(batch, tuple(parts))
    if isinstance(batch, list):
        return rebuilt(batch, [move(part, device) for part in batch])
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch


def rebuilt(old: Any, new: Any) -> Any:
    """`new` as `old`'s own class, where that takes what its base takes."""
    if type(old) is type(new):
        return new
    try:
        return type(old)(new)
    except TypeError:
        return new


def samples_in(batch: Any) -> int:
    """The length of the first tensor found: how many samples a batch has."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    for part in batch:
        if samples := samples_in(part):
            return samples
    return 0


def can_be_cut(batch: Any, size: int) -> bool:
    """Whether everything in it has a row for each sample."""
    parts = list(_parts(batch))
    return bool(parts) and all(len(part) == size for part in parts)


def can_be_joined(batches: Sequence[Any]) -> bool:
    """Whether samples of all of them fit one tensor: padding may be that of each batch."""
    shapes = {tuple(part.shape[1:] for part in _parts(batch) if isinstance(part, torch.Tensor)) for batch in batches}
    return len(shapes) == 1


def _parts(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield batch if batch.dim() else ()
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _parts(part)
    elif _has_parts(batch):
        for part in batch:
            yield from _parts(part)
    elif isinstance(batch, list | tuple):
        yield batch
    else:
        yield ()


def _has_parts(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and any(
        isinstance(part, torch.Tensor | Mapping | list | tuple) for part in batch
    )


def joined(batches: Sequence[Any]) -> Any:
    """Batches one after another as one: tensors along their first dimension, at whatever depth they lie."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(batches)) if first.dim() else torch.stack(tuple(batches))
    if isinstance(first, Mapping):
        return rebuilt(first, {key: joined([batch[key] for batch in batches]) for key in first})
    if _has_parts(first):
        parts = [joined(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else rebuilt(first, type(first)(parts))
    if isinstance(first, list | tuple):
        return type(first)(row for batch in batches for row in batch)
    return first


def rows_of(batch: Any, rows: Iterable[int]) -> Any:
    """The batch with these of its samples, in this order."""
    rows = list(rows)
    if isinstance(batch, torch.Tensor):
        return batch[torch.tensor(rows, device=batch.device)]
    if isinstance(batch, Mapping):
        return rebuilt(batch, {key: rows_of(part, rows) for key, part in batch.items()})
    if _has_parts(batch):
        parts = [rows_of(part, rows) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else rebuilt(batch, type(batch)(parts))
    return type(batch)(batch[at] for at in rows)


def turned(batch: Any) -> Any:
    """Its samples in the opposite order."""
    if isinstance(batch, torch.Tensor):
        return batch.flip(0) if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: turned(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _has_parts(batch):
            parts = [turned(part) for part in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return type(batch)(reversed(batch))
    return batch


def contents(batch: Any) -> list[str]:
    """A short name for each sample, made of what is in it."""
    if isinstance(batch, torch.Tensor) and batch.dim():
        rows = batch.detach().cpu().contiguous()
        return [_digest(row.reshape(-1).view(torch.uint8).numpy().tobytes()) for row in rows]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        parts = [contents(part) for part in batch]
        longest = max(map(len, parts), default=0)
        same = [part for part in parts if len(part) == longest]
        return [_digest("".join(names).encode()) for names in zip(*same, strict=True)]
    return [_digest(repr(batch).encode())]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
