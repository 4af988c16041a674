"""Writes memory that other processes open by its path."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

_MAPS: dict[int, weakref.ref[Map]] = {}
"""address → map, of those that live in this process"""

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
            os.fchmod(self.fd, 0o600)  # Linux makes a memfd for everybody
            os.ftruncate(self.fd, size)
        except BaseException:
            self.close()
            raise
        self._map: mmap.mmap | None = None
        self._touched = False

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Offsets, rising, and what to write there. `pwrite` fills fresh pages faster than a map does; touched ones
        are quicker through the map."""
        stage: Any = None
        start = used = 0
        for offset, data in pieces:
            if data.nbytes >= STAGE:
                self._write(offset, data)
                continue
            if offset + data.nbytes - start > STAGE or not used:  # what lies between may have been written already
                self._write(start, memoryview(stage or b"")[:used])
                start, used = offset, 0
            # A map by itself: one that grows would leave holes all over the heap, while what is written is fetched.
            stage = stage or mmap.mmap(-1, STAGE)
            at = offset - start
            stage[used:at] = bytes(at - used)
            used = at + data.nbytes
            stage[at:used] = data
        self._write(start, memoryview(stage or b"")[:used])
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
        if (mapped := getattr(self, "_map", None)) is not None:
            mapped.close()
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


def untouched(address: int, size: int) -> bool:
    """Whether this is memory of a map in which this process has written nothing since it was mapped or renewed.

    The operating system knows it: a private map's page that was written is the process's own, the others are still
    the segment's. Asking costs a hundredth of reading what is there. False wherever it is not certain.
    """
    if size < STAGE:  # a checksum is as quick
        return False
    for start, reference in list(_MAPS.items()):
        mapped = reference()
        if mapped is None:
            del _MAPS[start]
        elif start <= address and address + size <= start + len(mapped):
            return not _has_own_pages(address, size)
    return False


def _has_own_pages(address: int, size: int) -> bool:
    import numpy as np

    first = address // mmap.PAGESIZE
    count = (address + size - 1) // mmap.PAGESIZE - first + 1
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            table.seek(8 * first)
            entries = np.frombuffer(table.read(8 * count), np.uint64)
    except OSError:  # not on Linux, or not allowed
        return True
    if len(entries) < count:
        return True
    flags = entries >> np.uint64(61)  # bit 2: in memory, 1: swapped out, 0: the page is a file's
    return bool(np.any((flags > 1) & (flags % np.uint64(2) == 0)))


class Map(mmap.mmap):
    """A reader's private map of a segment; a subclass, because those take weak references on every Python."""

    @staticmethod
    def of(path: str, size: int) -> Map:
        fd = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_uid != os.geteuid():  # a process number that has become another user's
                raise PermissionError(f"{path} belongs to another user")
            made = Map(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        _MAPS[made.address] = weakref.ref(made)
        return made

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
