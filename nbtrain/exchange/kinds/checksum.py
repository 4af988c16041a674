"""Computes numbers that tell whether content changed.

Versions are not enough: `.data` writes, fused optimizers, BatchNorm statistics and numpy aliases
leave a tensor's version alone. So the bytes are looked at. Small blocks take a CRC of their raw
memory (half a microsecond and 5 GB/s). Large ones are read in blocks of 64-bit words, each laid out
as a matrix twice, with 1021 and with 1019 columns, and the columns (lanes) are summed. Both are primes,
so no two words of a block have both lanes in common: what trades places, be it one word or many rows,
is seen wherever it goes. The sums of all blocks, in order, take a CRC.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nbtrain.compat import tensors

if TYPE_CHECKING:
    import numpy as np
    import torch

SMALL = 1 << 16
ONE, OTHER = 1021, 1019
"""Lanes: primes, so that rows of ordinary matrices do not fall on the same."""
LAYOUTS = ONE, OTHER
ROWS = 64
"""of a block, half a megabyte: it lies in the processor's cache while it is read twice"""
AT_ONCE = 8
"""blocks that one of torch's threads is given at a time"""
LARGE = 1 << 25
"""Bytes for which torch's threads are woken; where the cores are busy, their meeting costs milliseconds."""


def raw(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes at an address. The caller keeps their owner alive."""
    return (ctypes.c_char * size).from_address(address)


def checksum(tensor: torch.Tensor) -> int:
    """A number for the content of a tensor of any kind, the same on every device."""
    import torch

    if tensor.device.type == "meta" or tensor.numel() == 0:
        return 0
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return zlib.crc32(repr([checksum(part) for part in _parts(tensor.detach())]).encode())
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if not flat.is_contiguous():
        flat = flat.contiguous()
    size = flat.numel() * flat.element_size()
    if size <= SMALL:
        flat = flat.cpu()  # so that a small tensor has the same number on every device
        return zlib.crc32(raw(flat.data_ptr(), size))
    return _lanes(flat.reshape(-1).view(torch.uint8), size)


def _parts(tensor: Any) -> list[Any]:
    """The dense tensors that a sparse or quantized one is made of."""
    if tensor.is_quantized:
        return [tensor.int_repr()]
    layout = str(tensor.layout)
    if layout == "torch.sparse_coo":
        return tensors.sparse_parts(tensor)
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _whole(size: int) -> int:
    """How many of these bytes are whole rows."""
    return size // (8 * ONE) * 8 * ONE


def _lanes(data: torch.Tensor, size: int) -> int:
    import torch

    full_words = _whole(size)
    words = data[:full_words]
    if words.data_ptr() % 8:
        words = words.clone()
    rest = data[full_words:].cpu().numpy()
    return _number(_sums(words.view(torch.int64)), rest)


def _number(sums: Iterable[np.ndarray], rest: np.ndarray) -> int:
    number = 0
    for lanes_of_blocks in sums:
        number = zlib.crc32(lanes_of_blocks, number)
    return zlib.crc32(rest, number)


def _sums(words: torch.Tensor) -> Iterator[np.ndarray]:
    """The sums of the lanes, block by block; the last block has the rows that are left."""
    import torch

    on_cpu = words.device.type == "cpu"
    if on_cpu and (words.nbytes < LARGE or torch.get_num_threads() == 1):
        yield from _sums_alone(words.numpy())
        return
    size = ROWS * ONE
    step = AT_ONCE * size * torch.get_num_threads() if on_cpu else max(size, len(words) // size * size)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        for blocks in (part[: len(part) // size * size].view(-1, size), part[len(part) // size * size :].view(1, -1)):
            if not blocks.numel():  # sums of nothing would count as a block
                continue
            first, other = (
                blocks[:, : blocks.shape[1] // lanes * lanes].unflatten(1, (-1, lanes)) for lanes in LAYOUTS
            )
            for each, another in zip(first.sum(1).cpu().numpy(), other.sum(1).cpu().numpy(), strict=True):
                yield each
                yield another


def _sums_alone(words: np.ndarray) -> Iterator[np.ndarray]:
    """The same by one thread."""
    import numpy as np

    for start in range(0, len(words), ROWS * ONE):
        block = words[start : start + ROWS * ONE]
        for lanes in LAYOUTS:
            yield np.add.reduce(block[: len(block) // lanes * lanes].reshape(-1, lanes), axis=0)


def array_checksum(array: np.ndarray) -> int:
    """The same number for an array's bytes; torch is used where it is loaded, because it has more threads."""
    import numpy as np

    flat = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if flat.nbytes == 0:
        return 0
    if flat.nbytes <= SMALL:
        return zlib.crc32(raw(flat.ctypes.data, flat.nbytes))
    data = flat.reshape(-1).view(np.uint8)
    full_words = _whole(flat.nbytes)
    aligned = data[:full_words] if flat.ctypes.data % 8 == 0 else data[:full_words].copy()
    words = aligned.view(np.int64)
    torch: Any = sys.modules.get("torch")
    # torch warns of memory that it must not write to
    threads = torch is not None and words.flags.writeable
    return _number(_sums(torch.from_numpy(words)) if threads else _sums_alone(words), data[full_words:])


def lanes(data: np.ndarray) -> int:
    """A number for bytes in the processor's cache, where one thread is quicker than two that have to meet."""
    import numpy as np

    full_words = _whole(data.nbytes)
    return _number(_sums_alone(data[:full_words].view(np.int64)), data[full_words:])


def memory_checksum(data: memoryview) -> int:
    """A number for a block of bytes that may be read-only."""
    if data.nbytes <= SMALL:
        return zlib.crc32(data)
    import numpy as np

    return array_checksum(np.frombuffer(data, np.uint8))
