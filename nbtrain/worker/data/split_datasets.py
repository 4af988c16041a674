"""Fingerprints data sets, to find those that a cell has split among the ranks by itself: `data[rank::world_size]`.

If nbtrain deals such data out once more, samples are lost. A rank alone cannot tell: `X[::2]` is rank 0's part of two,
or every second sample for all. So the notebook compares the fingerprints of all ranks when the cell ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nbtrain.compat import training_libraries

ENDS = 64
"""How many elements of a list are read at either end."""
LARGE = 4096
"""How many numbers of a tensor or an array are read."""
PLAIN = (bool, int, float, str, bytes)


def number(dataset: Any) -> int:
    """A fingerprint of a data set: equal for equal data, as far as can be seen without taking a sample."""
    checksum = 0
    for part in _parts(dataset, set()):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _parts(dataset: Any, seen: set[int]) -> Iterator[bytes]:
    """Its length, and its tensors, arrays and lists; plain numbers beside them may be a rank's own. `seen`: ids of data
    sets that were read, as they may hold each other."""
    seen.add(id(dataset))
    try:
        yield b"%d" % len(dataset)
    except Exception:  # it has no length, or none yet
        yield b"-"
    for row in training_libraries.ends_of_rows(dataset):
        yield row.encode()
    for value in vars(dataset).values() if isinstance(dataset, Dataset) else [dataset]:
        if isinstance(value, Dataset):
            if id(value) not in seen:
                yield from _parts(value, seen)
        elif isinstance(value, (list, tuple, range)):
            for end in _ends(value):
                yield from _of(end)
        elif not isinstance(value, PLAIN):
            yield from _of(value)


def closure_values(function: FunctionType) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            values.append(cell.cell_contents)
    return values


def _of(value: Any, deep: int = 2) -> Iterator[bytes]:
    """The bytes of a tensor, an array, or a sample of such and of plain values."""
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_meta or value.is_nested):
        yield str(None if value.is_nested else value.shape).encode()
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield str(value.shape).encode()
        for part in (value,) if not value.ndim or len(value) <= 4 else (value[:2], value[-2:]):
            yield _bytes(part)
    elif isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, (list, tuple)) and deep:
        for end in _ends(value):
            yield from _of(end, deep - 1)


def _bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return b"" if value.dtype.hasobject else value.reshape(-1)[:LARGE].tobytes()
    flat: torch.Tensor = value.detach().reshape(-1)[:LARGE].cpu().resolve_conj().resolve_neg().contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def _ends(values: Sequence[Any]) -> Iterable[Any]:
    return values if len(values) <= 2 * ENDS else chain(values[:ENDS], values[-ENDS:])
