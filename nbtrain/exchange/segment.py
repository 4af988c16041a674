"""Memory that other processes open by its path."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

STAGE = 1 << 20
"""Small buffers are gathered up to here before they are written: a call costs more than their bytes."""


class Segment:
    """The writer's side: a memfd on Linux, which no /dev/shm limit bounds, a private file elsewhere."""

    def __init__(self, number: int, size: int, directory: str) -> None:
        self.number = number
        self.size = size
        if sys.platform == "linux":
            self.fd = os.memfd_create(f"nbtrain-{number}", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.fd, self.path = tempfile.mkstemp(prefix="segment-", dir=directory)
        try:
            os.ftruncate(self.fd, size)
        except BaseException:
            self.close()
            raise
        self._map: mmap.mmap | None = None
        self._touched = False

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Offsets, rising, and what to write there. `pwrite` fills fresh pages faster than a map does; touched ones
        are quicker through the map."""
        stage, start = bytearray(), 0
        for offset, data in pieces:
            if data.nbytes >= STAGE:
                self._write(offset, data)
                continue
            if len(stage) + data.nbytes > STAGE or not stage:
                self._write(start, memoryview(stage))
                stage, start = bytearray(), offset
            stage += bytes(offset - start - len(stage))
            stage += data
        self._write(start, memoryview(stage))

    def filled(self) -> None:
        """All of it was written once."""
        self._touched = True

    def _write(self, offset: int, data: memoryview) -> None:
        if self._touched and data.nbytes >= STAGE:
            if self._map is None:
                self._map = mmap.mmap(self.fd, self.size)
            _copy(self._map, offset, data)
            return
        while data.nbytes:
            done = os.pwrite(self.fd, data, offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        if getattr(self, "_map", None) is not None:
            self._map.close()  # type: ignore[union-attr]
        os.close(self.fd)
        if sys.platform != "linux":
            os.unlink(self.path)


def _copy(target: mmap.mmap, offset: int, data: memoryview) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        target[offset : offset + data.nbytes] = data
        return
    import numpy as np

    into = torch.frombuffer(target, dtype=torch.uint8, count=data.nbytes, offset=offset)
    array = np.frombuffer(data, np.uint8)
    if not array.flags.writeable:
        into.numpy()[:] = array
    else:
        into.copy_(torch.from_numpy(array))


class Map(mmap.mmap):
    """A reader's private map of a segment; a subclass, because those take weak references on every Python."""

    @staticmethod
    def of(path: str, size: int) -> Map:
        fd = os.open(path, os.O_RDONLY)
        try:
            return Map(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def renew(self) -> bool:
        """Drop the private pages, so that the segment's present content shows through."""
        if sys.platform != "linux":  # elsewhere the advice may be ignored
            return False
        self.madvise(mmap.MADV_DONTNEED)
        return True

    def detach(self) -> None:
        """Make every page private: later writes to the segment are not seen."""
        for offset in range(0, len(self), mmap.PAGESIZE):
            self[offset] = self[offset]
