"""Segments: nobody ever sees what was meant for others, and memory is let go when the last one has."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nbtrain.exchange import parcel as parcels
from nbtrain.exchange.kinds.base import ParcelContent
from nbtrain.exchange.parcel import LARGE, SPARE, Opener, Packer
from nbtrain.exchange.shared_memory import STAGE, Map, Segment, untouched
from tests.support.sides import Sides

SIZE = 2 * LARGE


@pytest.fixture
def packer(tmp_path: Path) -> Iterator[Packer]:
    made = Packer(str(tmp_path))
    yield made
    made.close()


def content(*buffers: np.ndarray, places: tuple[int, ...] = ()) -> ParcelContent:
    views = [memoryview(buffer.view(np.uint8)) for buffer in buffers]
    return ParcelContent(buffers=views, places=dict(enumerate(places)))


def full(value: int, size: int = SIZE) -> np.ndarray:
    return np.full(size, value, np.uint8)


MIXED = [
    (5, 0, 64),
    (100_000, 3, 70_000),
    (SIZE, 10, SIZE + 1),
    (STAGE, STAGE - 1, 1, STAGE + 1),
    (100_000, 3 * STAGE, 100, 2 * STAGE, 7, STAGE),  # a small one on each side of one that is written by itself
    *(tuple(map(int, 2 ** np.random.default_rng(seed).uniform(0, 23, 12))) for seed in range(20)),
]


@pytest.mark.parametrize("sizes", MIXED)
def test_buffers_arrive_whole_aligned_and_writable(packer: Packer, sizes: tuple[int, ...]) -> None:
    sent = [np.random.default_rng(size).integers(0, 255, size, np.uint8) for size in sizes]
    opener = Opener()
    _, buffer = opener.open(packer.pack(content(*sent), (0,)))
    for index, data in enumerate(sent):
        got = np.frombuffer(buffer(index), np.uint8)
        assert np.array_equal(got, data)
        if data.size:
            assert got.ctypes.data % 8 == 0
            got[0] ^= 1
    _, again = Opener().open(packer.pack(content(*sent), (0,)))
    assert all(np.array_equal(np.frombuffer(again(i), np.uint8), data) for i, data in enumerate(sent))


def test_a_segment_that_somebody_maps_is_never_given_to_other_data(packer: Packer) -> None:
    one, two = Opener(), Opener()
    first = packer.pack(content(full(1)), (0, 1))
    views = [opener.open(first)[1](0) for opener in (one, two)]
    packer.released(0, ())
    second = packer.pack(content(full(2)), (0, 1))
    assert not set(first.segments) & set(second.segments)
    del views[0]
    packer.released(0, one.released())
    third = packer.pack(content(full(3)), (0,))
    assert not set(first.segments) & set(third.segments)
    assert bytes(views[0][:3]) == b"\1\1\1", "the other reader's pages, none of which it has touched"
    views.clear()
    packer.released(1, two.released())
    assert set(packer.pack(content(full(4)), (0,)).segments) == set(first.segments)


def test_what_was_never_mapped_is_released_all_the_same(packer: Packer) -> None:
    opener = Opener()
    made = packer.pack(content(full(1)), (0,))
    opener.open(made)
    assert opener.released() == tuple(made.segments)
    assert opener.released() == ()


def test_spare_segments_are_closed_beyond_a_limit_and_mapped_ones_never(
    packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "SPARE", 2 * SIZE)
    assert SPARE > 2 * SIZE
    opener = Opener()
    made = [packer.pack(content(full(n)), (0,)) for n in range(4)]
    kept = opener.open(made[0])[1](0)
    for each in made[1:]:
        opener.open(each)
    packer.released(0, opener.released())
    paths = [path for each in made for path, _ in each.segments.values()]
    assert [os.path.exists(path) for path in paths] == [True, False, True, True], "the mapped one, and the youngest two"
    assert kept[5] == 0
    packer.close()
    assert not any(map(os.path.exists, paths))
    assert kept[5] == 0, "a map outlives its segment's owner"


def test_a_large_array_is_written_again_where_its_readers_map_it(sides: Sides) -> None:
    sides.run(f"import torch, numpy\nt = torch.zeros({SIZE}, dtype=torch.uint8)")
    sides.run(f"f = numpy.zeros(({LARGE >> 3}, 3), order='F')")
    sides.out()
    before = sides.there("t.data_ptr(), f.ctypes.data")
    sides.twins[0].namespace["alias"] = sides.there("t[5:9]")
    sides.there("t.fill_(9)")  # private pages everywhere
    segments = set(sides.notebook_side.packer._segments)
    sides.run("t[6] = 4; f[1, 2] = 8; f[0] = 3")
    version = sides.there("t._version")
    sides.out()
    assert sides.there("t.data_ptr(), f.ctypes.data") == before
    assert [len(maps) for maps in sides.twins[0].opener._maps.values()] == [1, 1], "nothing was copied"
    assert sides.there("alias.tolist()") == [0, 4, 0, 0]
    assert sides.there("t.sum()") == 4
    assert sides.there("f[1, 2] == 8 and f[0].tolist() == [3, 3, 3] and f.sum() == 17 and f.flags.f_contiguous")
    assert set(sides.notebook_side.packer._segments) == segments
    assert sides.there("t._version") > version, "a graph recorded before must notice"
    assert sides.unsent() == []
    sides.distributed("t[1] = 7", ["t"])
    assert sides("t[1] == 7 and t.sum() == 11")


def test_a_twin_that_has_moved_gets_a_copy_and_what_it_left_stays_as_it_was(sides: Sides) -> None:
    sides.run(f"import torch\nt = torch.ones({SIZE}, dtype=torch.uint8)")
    sides.distributed("old = t.detach()[:3]; t.data = t.data + 1", ["t"])
    assert sides.there("t[0] == 2 and old[0] == 1")
    sides.run("t.fill_(5)")
    sides.out(["t"])
    assert sides.there("t[0] == 5 and t[-1] == 5")
    assert sides.there("old.untyped_storage()[100]") == 1, "written again behind its back"


def test_a_parcel_that_fails_half_way_is_made_good_by_the_next(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    sides.run(f"import torch\na = torch.zeros({SIZE}, dtype=torch.uint8); b = torch.zeros({SIZE}, dtype=torch.uint8)")
    sides.out()
    write, failing = Segment.write, []

    def full_disk(self: Segment, pieces: object) -> None:
        write(self, pieces)  # type: ignore[arg-type]
        if failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "write", full_disk)
    sides.run("a.fill_(1)")
    failing.append(True)
    with pytest.raises(OSError, match="No space"):
        sides.out()
    failing.clear()
    sides.run("a.fill_(0)")  # as the rank had it, but for what was written meanwhile
    assert sides.unsent() == ["tensor"]
    sides.out()
    assert sides.there("int(a.sum())") == 0


def test_memory_of_a_dropped_array_is_free_although_small_things_that_came_with_it_live(packer: Packer) -> None:
    opener = Opener()
    made = packer.pack(content(full(1), full(2, 100_000)), (0,))
    _, buffer = opener.open(made)
    large, small = torch.frombuffer(buffer(0), dtype=torch.uint8), torch.frombuffer(buffer(1), dtype=torch.uint8)
    gone = weakref.ref(large)
    del large, buffer
    gc.collect()
    assert gone() is None
    assert opener.released() == (made.pieces[0].segment,)
    assert small[0] == 2


def test_what_nobody_wrote_to_is_known_without_reading_it(tmp_path: Path) -> None:
    """And a write to any of its bytes, by whatever way, is seen."""
    segment = Segment(1, 1 << 22, str(tmp_path))
    try:
        segment.write([(0, memoryview(bytes(1 << 22)))])
        array = np.frombuffer(memoryview(Map.of(segment.path, 1 << 22)), np.uint8)
        address = array.ctypes.data
        assert untouched(address, array.nbytes)
        assert array.sum() == 0
        assert untouched(address, array.nbytes), "reading is no change"
        torch.from_numpy(array).data[3_000_000] += 1
        assert not untouched(address, array.nbytes)
        assert untouched(address, 1 << 20), "the first quarter was not written"
        other = np.zeros(1 << 22, np.uint8)
        assert not untouched(other.ctypes.data, other.nbytes), "memory of no segment is never certain"
        assert array.base.obj.renew()
        assert untouched(address, array.nbytes)
        assert array[3_000_000] == 0
    finally:
        del array
        segment.close()


def test_a_large_buffer_without_its_numbers_is_zeros_apart_from_all_others(tmp_path: Path) -> None:
    packer = Packer(str(tmp_path), numbers=False)
    try:
        parcel = packer.pack(content(full(1), full(2, SIZE + 1), full(3, 100_000), full(4)), [0])
        _, buffer = Opener().open(parcel)
        found = [buffer(index) for index in range(4)]
        assert [one.nbytes for one in found] == [SIZE, SIZE + 1, 100_000, SIZE]
        assert [bytes(one[:2]) for one in found] == [b"\0\0", b"\0\0", b"\3\3", b"\0\0"]
        found[0][0] = 7
        assert [one[0] for one in found] == [7, 0, 3, 0]
        assert len(packer._segments) == 2
    finally:
        packer.close()
