"""Checksums: equal for equal content wherever it lies, different for every change that a sum would miss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbtrain.exchange.kinds.checksum import (
    LARGE,
    ONE,
    OTHER,
    ROWS,
    SMALL,
    array_checksum,
    checksum,
    lanes,
    memory_checksum,
)

SIZES = [1, 100, 70_000, 1_000_003, (1 << 24) + 5]


@pytest.mark.parametrize("size", SIZES)
def test_one_changed_byte_is_seen_wherever_it_is(size: int) -> None:
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    number = checksum(data)
    for at in {0, size // 3, size // 2, size - 1}:
        data[at] ^= 1
        assert checksum(data) != number
        data[at] ^= 1
    assert checksum(data) == number


@pytest.mark.parametrize("size", SIZES[1:])
def test_two_values_exchanged_are_seen(size: int) -> None:
    data = torch.arange(size, dtype=torch.float64)
    number = checksum(data)
    data[[0, size // 2]] = data[[size // 2, 0]]
    assert checksum(data) != number


@pytest.mark.parametrize(
    ("count", "apart"),
    [
        (count, apart)
        for count in (4093, 8200, 20_000, 300_000, (1 << 21) + 5)
        for apart in (1, 16, ONE, OTHER, 2 * ONE, ONE * ROWS, 4 * ONE * ROWS, 4093, 32749)
        if apart < count
    ],
)
def test_a_value_that_moves_or_trades_places_is_seen_wherever_it_goes(count: int, apart: int) -> None:
    for start in {0, 7, (count - apart) // 2, count - apart - 1}:
        data = torch.zeros(count, dtype=torch.int64)
        data[start] = 1
        array = data.numpy().copy()
        array.flags.writeable = False  # torch does not read it
        moved = data.clone()
        moved[start], moved[start + apart] = 0, 1
        one, other = checksum(data), checksum(moved)
        assert one == array_checksum(array) == array_checksum(data.numpy())
        assert other == array_checksum(moved.numpy())
        assert one != other
        if data.nbytes > SMALL:
            assert lanes(data.view(torch.uint8).numpy()) == one
            assert lanes(moved.view(torch.uint8).numpy()) == other
        ordered = torch.arange(count)
        traded = ordered.clone()
        traded[[start, start + apart]] = traded[[start + apart, start]]
        assert checksum(ordered) != checksum(traded)


@pytest.mark.parametrize("apart", [1, 7, 127, 131, 1000, 4093, 16637, 50_000])
@pytest.mark.parametrize("width", [1, 10, 131])
def test_rows_of_equal_sums_that_trade_places_are_seen(width: int, apart: int) -> None:
    """As labels that are one-hot, of which two are exchanged."""
    rows = torch.zeros(apart + 20_000, width, dtype=torch.int64)
    rows[:, 0] = 1
    for first in (0, 19_999):
        data = rows.clone()
        data[first], data[first + apart] = 0, 0
        data[first, 0] = data[first + apart, width - 1] = 1
        if width == 1:
            data[first] = 2
        traded = data.clone()
        traded[[first, first + apart]] = traded[[first + apart, first]]
        assert not torch.equal(data, traded)
        assert checksum(data) != checksum(traded)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_same_on_a_device(size: int) -> None:
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    assert checksum(data.cuda()) == checksum(data)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("words", [LARGE // 8 + 5, 80 * ONE * ROWS, 80 * ONE * ROWS + 3])
def test_it_does_not_depend_on_how_many_threads_add(threads: int, words: int) -> None:
    data = torch.randint(-(2**62), 2**62, (words,))
    number = lanes(data.view(torch.uint8).numpy())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert checksum(data) == array_checksum(data.numpy()) == number
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES)
def test_it_depends_on_content_only(size: int) -> None:
    data = np.random.default_rng(0).integers(0, 255, size + 3, np.uint8)
    odd = data[3:]  # not aligned
    assert array_checksum(odd) == array_checksum(odd.copy()) == memory_checksum(memoryview(odd.tobytes()))
    tensor = torch.from_numpy(odd.copy())
    assert checksum(tensor) == checksum(torch.stack([tensor, tensor], 1)[:, 0]) == array_checksum(odd)


@pytest.mark.parametrize("tensor", [
    torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(2).to(torch.float8_e5m2), torch.eye(3).to_sparse(), torch.tensor(True), torch.empty(0),
    torch.empty(3, device="meta"), torch.ones(3).expand(2, 3),
], ids=["bf16", "conj", "float8", "sparse", "0-d", "empty", "meta", "expanded"])  # fmt: skip
def test_every_kind_of_tensor_has_one(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone())


def test_lanes_see_what_moved_within_a_block() -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    number = lanes(data)
    data[:16] = np.roll(data[:16], 8)
    assert lanes(data) != number
