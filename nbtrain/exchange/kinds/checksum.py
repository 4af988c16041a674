"""Computes numbers that tell whether content changed.

Versions are not enough: `.data` writes, fused optimizers, BatchNorm statistics and numpy aliases
leave a tensor's version alone. So the bytes are looked at. Small blocks take a CRC of their raw
memory (half a microsecond and 5 GB/s). Large ones are read in blocks of 64-bit words, each laid out
as a matrix twice, with 131 and with 127 columns, and the columns (lanes) are summed. Both are primes,
so no two words of a block have both lanes in common: what trades places, be it one word or many rows,
is seen wherever it goes. The sums of all blocks, in order, take a CRC.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from typing import TYPE_CHECKING, Any

from nbtrain.compat import tensors

if TYPE_CHECKING:
    import numpy as np
    import torch

SMALL = 1 << 16
ONE, OTHER = 131, 127
"""Lanes: primes, so that rows of ordinary matrices do not fall on the same."""
WORDS = ONE * OTHER
"""of a block: 133 kB"""
CACHED = 4
"""blocks that lie in the processor's cache while they are read twice"""
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
    """How many of these bytes are whole blocks."""
    return size // (8 * WORDS) * 8 * WORDS


def _lanes(data: torch.Tensor, size: int) -> int:
    import torch

    whole = _whole(size)
    words = data[:whole]
    if words.data_ptr() % 8:
        words = words.clone()
    rest = data[whole:].cpu().numpy()
    return _number(*_sums(words.view(torch.int64).view(-1, WORDS)), rest)


def _number(one: np.ndarray, other: np.ndarray, rest: np.ndarray) -> int:
    return zlib.crc32(rest, zlib.crc32(other, zlib.crc32(one)))


def _sums(blocks: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The sums of each block's lanes, of one layout and of the other."""
    import torch

    if blocks.device.type == "cpu" and (blocks.nbytes < LARGE or torch.get_num_threads() == 1):
        return _sums_alone(blocks.numpy())
    count = len(blocks) if blocks.device.type != "cpu" else CACHED * torch.get_num_threads()
    one, other = blocks.new_empty(len(blocks), ONE), blocks.new_empty(len(blocks), OTHER)
    for start in range(0, len(blocks), count):
        part = blocks[start : start + count]
        torch.sum(part.view(-1, OTHER, ONE), 1, out=one[start : start + count])
        torch.sum(part.view(-1, ONE, OTHER), 1, out=other[start : start + count])
    return one.cpu().numpy(), other.cpu().numpy()


def _sums_alone(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by one thread."""
    import numpy as np

    one, other = np.empty((len(blocks), ONE), np.int64), np.empty((len(blocks), OTHER), np.int64)
    for start in range(0, len(blocks), CACHED):
        part = blocks[start : start + CACHED]
        np.add.reduce(part.reshape(-1, OTHER, ONE), axis=1, out=one[start : start + CACHED])
        np.add.reduce(part.reshape(-1, ONE, OTHER), axis=1, out=other[start : start + CACHED])
    return one, other


def array_checksum(array: np.ndarray) -> int:
    """The same number for an array's bytes; torch is used where it is loaded, because it has more threads."""
    import numpy as np

    flat = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if flat.nbytes == 0:
        return 0
    if flat.nbytes <= SMALL:
        return zlib.crc32(raw(flat.ctypes.data, flat.nbytes))
    data = flat.reshape(-1).view(np.uint8)
    whole = _whole(flat.nbytes)
    aligned = data[:whole] if flat.ctypes.data % 8 == 0 else data[:whole].copy()
    words = aligned.view(np.int64).reshape(-1, WORDS)
    torch: Any = sys.modules.get("torch")
    # torch warns of memory that it must not write to
    threads = torch is not None and words.flags.writeable
    return _number(*(_sums(torch.from_numpy(words)) if threads else _sums_alone(words)), data[whole:])


def lanes(data: np.ndarray) -> int:
    """A number for bytes in the processor's cache, where one thread is quicker than two that have to meet."""
    import numpy as np

    whole = _whole(data.nbytes)
    return _number(*_sums_alone(data[:whole].view(np.int64).reshape(-1, WORDS)), data[whole:])


def memory_checksum(data: memoryview) -> int:
    """A number for a block of bytes that may be read-only."""
    if data.nbytes <= SMALL:
        return zlib.crc32(data)
    import numpy as np

    return array_checksum(np.frombuffer(data, np.uint8))
