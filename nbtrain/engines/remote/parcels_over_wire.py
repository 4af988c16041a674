"""Shared memory does not reach another machine: what a message or event shows of it is sent before, once a machine, and
written into a segment of the receiver's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbtrain.base.events import Finished, Pulled, Repacked
from nbtrain.base.messages import RunCell
from nbtrain.engines.remote.protocol import SegmentBytes
from nbtrain.exchange.parcel import Parcel
from nbtrain.exchange.shared_memory import Segment

CHUNK = 1 << 20
"""Bytes of a frame: what is urgent waits for no more than some of them."""
KERNEL = -1


def parcel_of(said: Any) -> Parcel | None:
    """The parcel in a message or event, if it shows any shared memory."""
    if isinstance(said, RunCell | Pulled):
        parcel: Parcel | None = said.parcel
    elif isinstance(said, Finished | Repacked):
        parcel = said.home.parcel if said.home is not None else None
    else:
        return None
    return parcel if parcel is not None and parcel.segments else None


def with_segments(said: Any, segments: dict[int, tuple[str, int]]) -> Any:
    """The same message or event, whose parcel lies in these segments."""
    if isinstance(said, RunCell | Pulled):
        return replace(said, parcel=replace(said.parcel, segments=segments))
    home = replace(said.home, parcel=replace(said.home.parcel, segments=segments))
    return replace(said, home=home)


def stretches(parcel: Parcel, generation: int, owner: int) -> Iterator[tuple[SegmentBytes, memoryview]]:
    """The bytes that a parcel shows of its segments, in pieces. They must not change until they were sent."""
    ends: dict[int, int] = {}
    for piece in parcel.pieces:
        ends[piece.segment] = max(ends.get(piece.segment, 0), piece.offset + piece.size)
    for number, (path, size) in parcel.segments.items():
        if not ends.get(number):
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            original = os.fstat(fd).st_ino
            content = memoryview(mmap.mmap(fd, ends[number], prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        for offset in range(0, ends[number], CHUNK):
            what = SegmentBytes(
                generation=generation, owner=owner, number=number, size=size, offset=offset, original=original
            )
            yield what, content[offset : offset + CHUNK]


class Copies:
    """The receiver's segments: one for each of the sender's that something may still show."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._segments: dict[tuple[int, int], Segment] = {}
        self._original: dict[tuple[int, int], int] = {}
        """the sender's segment that each is a copy of: its numbers begin anew with each exchange"""
        self._readers: dict[tuple[int, int], set[int]] = {}

    def write(self, what: SegmentBytes, data: memoryview) -> None:
        key = what.owner, what.number
        if self._original.get(key, what.original) != what.original:
            self._drop(key)  # who maps it still has it
        self._original[key] = what.original
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = Segment(what.number, what.size, self._directory)
        offset = what.offset
        while data.nbytes:
            done = os.pwrite(segment.fd, data, offset)
            data, offset = data[done:], offset + done

    def placed(self, said: Any, owner: int, readers: Iterable[int] = ()) -> Any:
        """The message or event as it is on this machine."""
        parcel = parcel_of(said)
        if parcel is None:
            return said
        segments = {}
        for number, (_, size) in parcel.segments.items():
            key = owner, number
            if key not in self._segments:  # nothing of it is shown
                self._segments[key] = Segment(number, size, self._directory)
            self._readers.setdefault(key, set()).update(readers)
            segments[number] = self._segments[key].path, size
        return with_segments(said, segments)

    def released(self, owner: int, numbers: Iterable[int], reader: int | None = None) -> None:
        """A reader, or whoever reads here, has let them go."""
        for number in numbers:
            readers = self._readers.get((owner, number), set())
            readers.discard(reader) if reader is not None else readers.clear()
            if not readers:
                self._drop((owner, number))

    def forget(self, owner: int) -> None:
        """That process is gone, and its segments with it."""
        for key in [key for key in list(self._segments) if key[0] == owner]:
            self._drop(key)

    def lost(self, reader: int) -> None:
        """A reader is gone."""
        for key, readers in list(self._readers.items()):
            if reader in readers:
                self.released(key[0], [key[1]], reader)

    def close(self) -> None:
        for key in list(self._segments):
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._readers.pop(key, None)
        self._original.pop(key, None)
        if (segment := self._segments.pop(key, None)) is not None:
            with suppress(OSError):
                segment.close()
