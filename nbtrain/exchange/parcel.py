"""What crosses between notebook and ranks becomes bytes here: one pickle, and large buffers in shared memory.

The sender writes a segment once; every rank maps it copy-on-write, so there is one copy of the bytes
however many ranks there are. A private mapping still shows the owner's later writes on pages its reader
has not touched, so a segment is written again only after everybody who mapped it has let it go. Fresh
pages cost five times what touched ones do: segments are kept for the next parcel.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle.cloudpickle as cp

from nbtrain.exchange.kinds.base import Make, Put
from nbtrain.exchange.walk import Cargo

ALIGN = 64
INLINE = 1 << 16
"""Up to this many bytes in all, buffers ride with the message: no file is opened for a loss value."""
LARGE = 1 << 22
"""A buffer from here on gets a segment of its own, so that a large array that is dropped lets its memory go
although small things that came with it are still in use."""
SPARE = 1 << 30
"""Bytes of segments kept for the next parcel."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one buffer lies."""

    segment: int
    """0: in the message"""
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """Ready to be sent. `segments`: number → (path, size)."""

    stream: bytes
    inline: bytes
    pieces: tuple[Piece, ...]
    segments: dict[int, tuple[str, int]]


class Segment:
    """Memory that other processes can open by its path: a memfd on Linux, which no /dev/shm limit bounds."""

    def __init__(self, number: int, size: int, directory: str) -> None:
        self.number = number
        self.size = size
        if sys.platform == "linux":
            self.fd = os.memfd_create(f"nbtrain-{number}", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.fd, self.path = tempfile.mkstemp(prefix="segment-", dir=directory)
        os.ftruncate(self.fd, size)
        self._map: mmap.mmap | None = None
        self.touched = False

    def write(self, data: memoryview, offset: int) -> None:
        """`pwrite` fills fresh pages faster than a map does; touched ones are quicker through the map."""
        if self.touched and data.nbytes >= LARGE:
            if self._map is None:
                self._map = mmap.mmap(self.fd, self.size)
            _copy(self._map, offset, data)
            return
        while data.nbytes:
            done = os.pwrite(self.fd, data, offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
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


class Packer:
    """The sender's side: makes parcels and owns their segments."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._segments: dict[int, Segment] = {}
        self._readers: dict[int, set[int]] = {}
        self._count = 0

    def pack(self, cargo: Cargo, readers: Iterable[int]) -> Parcel:
        stream = _dump(cargo)
        sizes = [data.nbytes for data in cargo.buffers]
        if sum(sizes) <= INLINE:
            offsets, _ = _layout(sizes)
            inline = bytearray(_layout(sizes)[1])
            for data, offset in zip(cargo.buffers, offsets, strict=True):
                inline[offset : offset + data.nbytes] = data
            pieces = tuple(Piece(0, offset, size) for offset, size in zip(offsets, sizes, strict=True))
            return Parcel(stream, bytes(inline), pieces, {})
        places: list[Piece] = [Piece(0, 0, 0)] * len(sizes)
        used: dict[int, tuple[str, int]] = {}
        small = [index for index, size in enumerate(sizes) if size < LARGE]
        for group in [small, *([index] for index, size in enumerate(sizes) if size >= LARGE)]:
            if not group:
                continue
            offsets, total = _layout([sizes[index] for index in group])
            segment = self._segment(total)
            for index, offset in zip(group, offsets, strict=True):
                segment.write(cargo.buffers[index], offset)
                places[index] = Piece(segment.number, offset, sizes[index])
            segment.touched = True
            self._readers[segment.number] = set(readers)
            used[segment.number] = segment.path, segment.size
        return Parcel(stream, b"", tuple(places), used)

    def released(self, reader: int, numbers: Iterable[int]) -> None:
        """A reader let go of segments."""
        for number in numbers:
            self._readers.get(number, set()).discard(reader)
        spare = 0
        for number in [n for n, readers in self._readers.items() if not readers]:
            spare += self._segments[number].size
            if spare > SPARE:
                self._segments.pop(number).close()
                del self._readers[number]

    def forget(self, reader: int | None = None) -> None:
        """A reader (or all of them) is gone, and its maps with it."""
        for readers in self._readers.values():
            readers.clear() if reader is None else readers.discard(reader)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._readers.clear()

    def _segment(self, size: int) -> Segment:
        size = max(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        free = [s for n, s in self._segments.items() if not self._readers[n] and size <= s.size <= 2 * size]
        if free:
            return min(free, key=lambda segment: segment.size)
        self._count += 1
        segment = self._segments[self._count] = Segment(self._count, size, self.directory)
        self._readers[self._count] = set()
        return segment


class Opener:
    """The receiver's side: maps segments and knows when the last view of each is gone."""

    def __init__(self, keep_open: bool = False) -> None:
        self._released: list[int] = []
        self._lock = threading.Lock()
        self._live: dict[int, weakref.ref[Any]] = {}

    def open(self, parcel: Parcel) -> tuple[Cargo, Callable[[int], memoryview]]:
        """What was packed, and its buffers by number: writable, and private to this process."""
        maps: dict[int, memoryview] = {number: self._map(number, *where) for number, where in parcel.segments.items()}
        maps[0] = memoryview(bytearray(parcel.inline))

        def buffer(index: int) -> memoryview:
            piece = parcel.pieces[index]
            return maps[piece.segment][piece.offset : piece.offset + piece.size]

        return _load(parcel.stream), buffer

    def released(self) -> tuple[int, ...]:
        with self._lock:
            gone, self._released = tuple(self._released), []
        return gone

    def _map(self, number: int, path: str, size: int) -> memoryview:
        fd = os.open(path, os.O_RDONLY)
        try:
            mapped = _Map(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        weakref.finalize(mapped, self._gone, number).atexit = False
        return memoryview(mapped)

    def _gone(self, number: int) -> None:
        # No lock: this may run inside `released` of the same thread, when garbage is collected there.
        self._released.append(number)


class _Map(mmap.mmap):
    """An mmap that takes weak references on every Python."""


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGN) * ALIGN
    return offsets, at


def _dump(cargo: Cargo) -> bytes:
    file = io.BytesIO()
    records = [(r.key, r.kind, r.args, r.anew) if type(r) is Make else (r.key, r.state) for r in cargo.records]  # type: ignore[union-attr]
    cp.Pickler(file, protocol=5).dump((records, cargo.names))
    return file.getvalue()


def _load(stream: bytes) -> Cargo:
    import pickle

    records, names = pickle.loads(stream)
    return Cargo([Make(*r) if len(r) == 4 else Put(*r) for r in records], [], names)
