"""Numbers that tell whether content changed.

Versions are not enough: `.data` writes, fused optimizers, BatchNorm statistics and numpy aliases
leave a tensor's `_version` alone. So the bytes are looked at. Small blocks take a CRC of their raw
memory (half a microsecond and 5 GB/s); large ones a sum over lanes, which is five times faster on
one core and, unlike a plain sum, sees permutations.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

SMALL = 1 << 16
LANES = 4093  # a prime, so that rows of ordinary matrices do not fall on the same lane
WIDE = 32749  # the same for large blocks: torch adds long rows twice as fast
LARGE = 1 << 24


def raw(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The memory itself. The caller keeps its owner alive."""
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


def _rows(size: int) -> tuple[int, int, int]:
    """Rows, lanes, and how many bytes those are."""
    count = WIDE if size >= LARGE else LANES
    rows = size // 8 // count
    return rows, count, rows * count * 8


def _parts(tensor: Any) -> list[Any]:
    """The dense tensors that a sparse or quantized one is made of."""
    if tensor.is_quantized:
        return [tensor.int_repr()]
    layout = str(tensor.layout)
    if layout == "torch.sparse_coo":
        return [tensor._indices(), tensor._values()]
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _lanes(data: torch.Tensor, size: int) -> int:
    import torch

    rows, count, whole = _rows(size)
    words = data[:whole]
    if words.data_ptr() % 8:
        words = words.clone()
    sums = words.view(torch.int64).view(rows, count).sum(0).cpu().numpy()
    return zlib.crc32(data[whole:].cpu().numpy(), zlib.crc32(sums))


def array_checksum(array: np.ndarray) -> int:
    """The same number for an array's bytes; torch is used where it is loaded, because it has more threads."""
    import numpy as np

    flat = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if flat.nbytes == 0:
        return 0
    if flat.nbytes <= SMALL:
        return zlib.crc32(raw(flat.ctypes.data, flat.nbytes))
    data = flat.reshape(-1).view(np.uint8)
    rows, count, whole = _rows(flat.nbytes)
    words = data[:whole]
    if flat.ctypes.data % 8:
        words = words.copy()
    words = words.view(np.int64)
    torch: Any = sys.modules.get("torch")
    if torch is not None and words.flags.writeable:
        sums = torch.from_numpy(words).view(rows, count).sum(0).numpy()
    else:
        sums = words.reshape(rows, count).sum(0)
    return zlib.crc32(data[whole:], zlib.crc32(sums))


def lanes(data: np.ndarray) -> int:
    """For bytes that lie in the processor's cache: one thread is quicker there than two that have to meet."""
    import numpy as np

    rows = data.nbytes // 8 // LANES
    whole = rows * LANES * 8
    sums = np.add.reduce(data[:whole].view(np.int64).reshape(rows, LANES), axis=0)
    return zlib.crc32(data[whole:], zlib.crc32(sums))


def memory_checksum(data: memoryview) -> int:
    """For a block of bytes that may be read-only."""
    if data.nbytes <= SMALL:
        return zlib.crc32(data)
    import numpy as np

    return array_checksum(np.frombuffer(data, np.uint8))
