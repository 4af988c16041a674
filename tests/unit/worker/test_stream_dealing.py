"""What each rank gets of a stream, and which streams are split by rank already."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from nbtrain.worker.data.stream_dealing import StreamShare, dealt_as_stream
from nbtrain.worker.parts import Deal

Pair = namedtuple("Pair", "x y")


def shares(batches: list[Any], count: int, **given: Any) -> tuple[list[list[Any]], int]:
    """What each rank gets, and how many samples were seen twice."""
    found, padded = [], [0] * count

    for rank in range(count):

        def pad(samples: int, rank: int = rank) -> None:
            padded[rank] += samples

        share = StreamShare(Deal(index=rank, count=count, split=given.get("split", False)), nullcontext, pad,
                            drop_last=given.get("drop_last", False), batched=given.get("batched", True))  # fmt: skip
        source = iter(batches)
        mine: list[Any] = []
        try:
            while True:
                mine.append(share.next(lambda source=source: next(source)))  # type: ignore[misc]
        except StopIteration:
            found.append(mine)
    assert len({len(one) for one in found}) == 1, "every rank gets as many"
    assert len(set(padded)) == 1, "and says the same"
    return found, padded[0]


def rows(*sizes: int) -> list[torch.Tensor]:
    numbers = torch.arange(sum(sizes))
    return list(numbers.split(list(sizes)))


def lists(found: list[list[torch.Tensor]]) -> list[list[list[int]]]:
    return [[one.tolist() for one in mine] for mine in found]


def test_whole_batches_go_round() -> None:
    found, padded = shares(rows(2, 2, 2, 2), 2)
    assert lists(found) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert padded == 0


@pytest.mark.parametrize(("sizes", "count", "wanted", "padded"), [
    ((2, 2, 2), 2, [[[0, 1], [4]], [[2, 3], [5]]], 0),
    ((2, 2, 2, 1), 2, [[[0, 1], [4, 6]], [[2, 3], [5, 4]]], 1),
    ((2,), 3, [[[0]], [[1]], [[0]]], 1),
    ((3, 1), 2, [[[0, 2]], [[1, 3]]], 0),
])  # fmt: skip
def test_a_last_round_is_dealt_out_evenly(sizes: Any, count: int, wanted: Any, padded: int) -> None:
    found, twice = shares(rows(*sizes), count)
    assert lists(found) == wanted
    assert twice == padded


def test_drop_last_leaves_an_incomplete_round_out() -> None:
    found, padded = shares(rows(2, 2, 2), 2, drop_last=True)
    assert lists(found) == [[[0, 1]], [[2, 3]]]
    assert padded == 0


def test_each_batch_may_be_cut() -> None:
    found, _ = shares(rows(4, 4), 2, split=True)
    assert lists(found) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_batches_of_every_form_are_cut() -> None:
    batch = {"x": Pair(torch.arange(3), [1, 2, 3]), "names": ["a", "b", "c"]}
    found, _ = shares([batch], 3)
    first, second, third = (mine[0] for mine in found)
    assert [one["x"].x.tolist() for one in (first, second, third)] == [[0], [1], [2]]
    assert [one["x"].y for one in (first, second, third)] == [[1], [2], [3]]
    assert [one["names"] for one in (first, second, third)] == [["a"], ["b"], ["c"]]


def test_batches_that_are_padded_each_by_itself_are_not_put_together() -> None:
    batches = [{"ids": torch.ones(*shape)} for shape in ((4, 5), (4, 7), (4, 6), (2, 8))]
    found, padded = shares(batches, 2)
    assert [[tuple(one["ids"].shape) for one in mine] for mine in found] == [[(4, 5), (4, 6)], [(4, 7), (4, 8)]]
    assert padded == 2, "as large a one"
    found, padded = shares(batches[:3], 2)
    assert [tuple(mine[-1]["ids"].shape) for mine in found] == [(2, 6), (2, 6)], "one alone is cut"
    assert padded == 0
    found, padded = shares(batches[:2], 3)
    assert [tuple(mine[-1]["ids"].shape) for mine in found] == [(4, 5), (4, 7), (4, 5)]
    assert padded == 4, "each rank needs one"


def test_what_cannot_be_cut_is_seen_twice() -> None:
    found, padded = shares([{"x": torch.ones(2), "mean": 0.5}] * 3, 2)
    assert [len(mine) for mine in found] == [2, 2]
    assert padded == 2
    found, padded = shares(["a", "b", "c"], 2, batched=False)
    assert found == [["a", "c"], ["b", "c"]]
    assert padded == 1


class Plain(IterableDataset[int]):
    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class ByRank(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(rank, 4, world_size)  # type: ignore[name-defined]  # noqa: F821


class ByEnvironment(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(int(os.environ["RANK"]), 4, 2)


class ByGroup(Plain):
    def part(self) -> range:
        import torch.distributed as dist

        return range(dist.get_rank(), 4, dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        yield from self.part()


class Held(Plain):
    def __init__(self, number: int, of: int) -> None:
        self.number, self.num_replicas = number, of


def by_node(source: Any) -> Any:
    return source[int(os.environ.get("RANK", 0)) :: 2]


@pytest.mark.parametrize(("dataset", "wanted"), [
    (Plain(), True),
    (Plain(Plain(torch.ones(3))), True),
    (Plain({"a": 1}), True),
    (ByRank(), False),
    (ByEnvironment(), False),
    (ByGroup(), False),
    (Plain(ByRank()), False),
    (Held(0, 2), False),
    (Held(0, 1), False),
    (Plain([len, by_node]), False),
    (Plain(lambda: ByRank), True),
])  # fmt: skip
def test_who_splits_by_rank_is_left_alone(dataset: Any, wanted: bool) -> None:
    assert dealt_as_stream(DataLoader(dataset, 2)) is wanted


def test_data_with_an_order_is_no_stream() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    assert not dealt_as_stream(DataLoader(data, 2))
    assert not dealt_as_stream(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0)))
