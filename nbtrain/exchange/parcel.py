"""Makes bytes of what crosses between notebook and ranks: one pickle, and large buffers in shared memory.

The sender writes a segment once; every rank maps it copy-on-write, so there is one copy of the bytes
however many ranks there are. A private mapping still shows the owner's later writes on pages its reader
has not touched. So a segment is given to other data only after everybody who mapped it has let it go.
Fresh pages cost five times what touched ones do: segments are kept for the next parcel.

The one exception is what makes a large array that changed cheap to send again: it goes into *its own*
segment, and every reader whose twin still lives there drops the pages it had made private. Ranks are
idle then, and what shows through is what they are to have. A reader's own processes (workers of a data
loader) that still map it see the new content too, on pages they have not written. A reader whose twin has
moved elsewhere while something of its own still uses the map makes that map private before its cell ends.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle as cp

from nbtrain.base.quick_pickle import quickly_pickled
from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.graph.rank_paths import RankPath
from nbtrain.exchange.kinds.base import Compound, EditTwin, Later, MakeTwin, ParcelContent, Ref
from nbtrain.exchange.shared_memory import Map, Segment

ALIGN = 64
INLINE = 1 << 16
"""Up to this many bytes in all, buffers ride with the message: no file is opened for a loss value."""
LARGE = 1 << 22
"""A buffer from here on gets a segment of its own, so that a large array that is dropped lets its memory go
although small things that came with it are still in use."""
SPARE = 1 << 30
"""Bytes of segments kept for the next parcel."""


class BufferPlace(NamedTuple):
    """Where one buffer lies. There are many in a parcel, and a tuple is pickled quickly."""

    segment: int
    """0: in the message"""
    offset: int
    size: int


@quickly_pickled
@dataclass(frozen=True, slots=True)
class Parcel:
    """Objects as bytes, ready to be sent. `segments`: number → (path, size)."""

    stream: bytes
    inline: bytes
    pieces: tuple[BufferPlace, ...]
    segments: dict[int, tuple[str, int]]


NewObject = tuple[int, str, RankPath | None]
"""A key that the lead gave to a new object, its kind, and where the other ranks find theirs."""


@quickly_pickled
@dataclass(frozen=True, slots=True)
class HomeParcel:
    """What a cell changed: packed by the lead rank, opened by the notebook."""

    parcel: Parcel
    news: tuple[NewObject, ...]
    deleted: tuple[str, ...]
    stayed: tuple[tuple[str, str, bool], ...]
    """path and reason of what stays on the ranks, and whether the notebook has it too"""
    holders: tuple[int, ...] = ()
    """keys of objects that hold others than before"""


class Packer:
    """The sender's side: makes parcels and owns their segments."""

    def __init__(self, directory: str, again: bool = True, numbers: bool = True) -> None:
        self.directory = directory
        self.again = again
        """whether readers are idle whenever something is packed, so that what they map may be written again"""
        self.numbers = numbers
        """False: whoever opens large buffers finds zeros, which take no memory"""
        self._segments: dict[int, Segment] = {}
        self._readers: dict[int, set[int]] = {}
        self._home: dict[int, tuple[int, int]] = {}
        """key of a large memory → the segment that has it all, and its size"""
        self._count = 0

    def pack(self, content: ParcelContent, readers: Iterable[int]) -> Parcel:
        readers = set(readers)
        stream = dump(content)
        sizes = [data.nbytes for data in content.buffers]
        if sum(sizes) <= INLINE:
            offsets, total = _layout(sizes)
            inline = bytearray(total)
            for data, offset in zip(content.buffers, offsets, strict=True):
                inline[offset : offset + data.nbytes] = _now(data)
            pieces = tuple(BufferPlace(0, offset, size) for offset, size in zip(offsets, sizes, strict=True))
            return Parcel(stream, bytes(inline), pieces, {})
        places: list[BufferPlace] = [BufferPlace(0, 0, 0)] * len(sizes)
        used: dict[int, tuple[str, int]] = {}
        for group in _groups(sizes):
            offsets, total = _layout([sizes[index] for index in group])
            if total >= LARGE and not self.numbers:
                number, file = self._hole(total)
            else:
                place = content.places.get(group[0]) if total >= LARGE and len(group) == 1 else None
                segment = self._segment(place, total, used)
                if place is not None and self._readers[segment.number]:
                    content.rewritten.add(place)
                self._readers[segment.number] |= readers
                segment.write((offset, _now(content.buffers[at])) for at, offset in zip(group, offsets, strict=True))
                number, file = segment.number, (segment.path, segment.size)
            for index, offset in zip(group, offsets, strict=True):
                places[index] = BufferPlace(number, offset, sizes[index])
            used[number] = file
        return Parcel(stream, b"", tuple(places), used)

    def released(self, reader: int, numbers: Iterable[int]) -> None:
        """Note that a reader no longer maps these segments."""
        for number in numbers:
            self._readers.get(number, set()).discard(reader)
        self._shrink()

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._readers.clear()
        self._home.clear()

    def _shrink(self) -> None:
        spare = 0
        # The youngest stay: they are of the sizes that are sent now.
        for number in [number for number in reversed(self._segments) if not self._readers[number]]:
            spare += self._segments[number].size
            if spare > SPARE:
                spare -= self._segments[number].size
                self._segments.pop(number).close()
                del self._readers[number]

    def _segment(self, place: int | None, size: int, used: dict[int, Any]) -> Segment:
        if self.again and place is not None and place in self._home:
            number, length = self._home[place]
            if length == size and number in self._segments and number not in used:
                return self._segments[number]
        segment = self._free(size, used)
        self._home = {key: home for key, home in self._home.items() if home[0] != segment.number}
        if place is not None:
            self._home[place] = segment.number, size
        return segment

    def _hole(self, size: int) -> tuple[int, tuple[str, int]]:
        """A segment number for so many zeros: the beginning of one empty file, which is mapped anew for each."""
        if 0 not in self._segments:
            self._segments[0] = Segment(0, 0, self.directory)
            self._readers[0] = {0}  # it is never free
        hole = self._segments[0]
        if size > hole.size:
            os.ftruncate(hole.fd, size)
            hole.size = size
        self._count += 1
        return self._count, (hole.path, size)

    def _free(self, size: int, used: dict[int, Any]) -> Segment:
        pages = max(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        free = [
            segment
            for number, segment in self._segments.items()
            if not self._readers[number] and number not in used and pages <= segment.size <= 2 * pages
        ]
        if free:
            return min(free, key=lambda segment: segment.size)
        self._count += 1
        segment = self._segments[self._count] = Segment(self._count, pages, self.directory)
        self._readers[self._count] = set()
        return segment


class Opener:
    """The receiver's side: maps segments, and knows which of them nothing shows any more."""

    def __init__(self) -> None:
        self._maps: dict[int, list[weakref.ref[Map]]] = {}
        """segment → its maps; one that was written again may have two"""
        self._pieces: tuple[BufferPlace, ...] = ()

    def open(self, parcel: Parcel) -> tuple[ParcelContent, Callable[[int], memoryview]]:
        """What was packed, and its buffers by number: writable, and private to this process."""
        self._pieces = parcel.pieces
        views: dict[int, memoryview] = {0: memoryview(bytearray(parcel.inline))}
        for number in parcel.segments:
            self._maps.setdefault(number, [])

        def buffer(index: int) -> memoryview:
            piece = parcel.pieces[index]
            view = views.get(piece.segment)
            if view is None:
                mapped = Map.of(*parcel.segments[piece.segment])
                self._maps[piece.segment].append(weakref.ref(mapped))
                view = views[piece.segment] = memoryview(mapped)
            return view[piece.offset : piece.offset + piece.size]

        return load(parcel.stream), buffer

    def renew(self, index: int, address: int) -> bool:
        """Whether what lies at `address` is this buffer's segment, mapped earlier. Then it shows what is there now."""
        piece = self._pieces[index]
        if piece.size < LARGE:
            return False
        return any(mapped.address == address and mapped.renew() for mapped in self._living(piece.segment))

    @property
    def maps_large(self) -> bool:
        """Whether anything is mapped that the sender may write again."""
        return any(len(mapped) >= LARGE for number in self._maps for mapped in self._living(number))

    def keep_apart(self, addresses: Iterable[int]) -> None:
        """Make maps private that are no twin's memory any more: they must not see what is written for the twin."""
        wanted = set(addresses)
        for number in self._maps if wanted else ():
            for mapped in self._living(number):
                if mapped.address in wanted:
                    mapped.detach()

    def released(self) -> tuple[int, ...]:
        """Segments that were mapped, or might have been, and are not any more."""
        gone = tuple(number for number in self._maps if not self._living(number))
        for number in gone:
            del self._maps[number]
        return gone

    def _living(self, number: int) -> list[Map]:
        living = [mapped for ref in self._maps[number] if (mapped := ref()) is not None]
        self._maps[number] = [weakref.ref(mapped) for mapped in living]
        return living


def fetched(content: ParcelContent) -> list[Later]:
    """The bytes that `pack` will fetch, in its order."""
    sizes = [data.nbytes for data in content.buffers]
    inline = sum(sizes) <= INLINE
    order = range(len(sizes)) if inline else [index for group in _groups(sizes) for index in group]
    return [data for index in order if isinstance(data := content.buffers[index], Later)]


def _now(data: memoryview | Later) -> memoryview:
    return data.fetch() if isinstance(data, Later) else data


def _groups(sizes: list[int]) -> list[list[int]]:
    """Which buffers lie in one segment: all the small ones, and each large one by itself."""
    small = [index for index, size in enumerate(sizes) if size < LARGE]
    large = [[index] for index, size in enumerate(sizes) if size >= LARGE]
    return [small, *large] if small else large


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGN) * ALIGN
    return offsets, at


class _Quick(pickle.Pickler):
    """Pickles records quickly: it has rules for references only, of which a large model has thousands.

    What is in a record is an atom, something importable or a code object; whatever is not is left to cloudpickle.
    """

    dispatch_table = {
        **cp.Pickler.dispatch_table,
        Ref: lambda ref: (Ref, (ref.key,)),
        Compound: lambda packed: (Compound, (packed.kind, packed.parts)),
    }


@gc_paused
def dump(content: ParcelContent) -> bytes:
    records: list[tuple[Any, ...]] = []
    for record in content.records:
        if type(record) is MakeTwin:
            place = () if record.place is None else (record.place,)
            records.append((record.key, record.kind, record.args, record.anew, *place))
        elif type(record) is EditTwin:
            records.append((record.key, record.state))
    file = io.BytesIO()
    try:
        _Quick(file, 5).dump((records, content.names))
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        cp.Pickler(file, protocol=5).dump((records, content.names))
    return file.getvalue()


@gc_paused
def load(stream: bytes) -> ParcelContent:
    records, names = pickle.loads(stream)
    return ParcelContent([MakeTwin(*record) if len(record) > 2 else EditTwin(*record) for record in records], [], names)
