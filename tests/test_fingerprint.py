"""Checksums: equal for equal content wherever it lies, different for every change that a sum would miss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbtrain.exchange.fingerprint import array_checksum, checksum, lanes, memory_checksum

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


@pytest.mark.parametrize("size", SIZES)
def test_it_depends_on_content_only(size: int) -> None:
    data = np.random.default_rng(0).integers(0, 255, size + 3, np.uint8)
    odd = data[3:]  # not aligned
    assert array_checksum(odd) == array_checksum(odd.copy()) == memory_checksum(memoryview(odd.tobytes()))
    tensor = torch.from_numpy(odd.copy())
    assert checksum(tensor) == checksum(torch.stack([tensor, tensor], 1)[:, 0]) == array_checksum(odd)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).to(torch.float8_e5m2), torch.eye(3).to_sparse(), torch.tensor(True), torch.empty(0),
        torch.empty(3, device="meta"), torch.ones(3).expand(2, 3),
    ],
    ids=["bf16", "conj", "float8", "sparse", "0-d", "empty", "meta", "expanded"],
)  # fmt: skip
def test_every_kind_of_tensor_has_one(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone())


def test_lanes_see_what_moved_within_a_block() -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    number = lanes(data)
    data[:16] = np.roll(data[:16], 8)
    assert lanes(data) != number
