"""Batches are dealt out: every sample once, equal batches on all ranks, the loader left as it was."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.none import NoStrategy
from nbtrain.worker.batches import move, samples_in
from nbtrain.worker.random_states.default_generators import capture
from tests.support.bench import make_runtime, running
from tests.support.ranks import run_on_ranks

Batches = list[list[int]]


def deal(make: Callable[[], DataLoader[Any]], world_size: int, **options: Any) -> tuple[list[Batches], list[int]]:
    """What each rank sees, and what `len` says there."""
    torch.manual_seed(0)
    start = capture()
    shares, lengths = [], []
    for rank in range(world_size):
        loader = make()
        torch.set_rng_state(start["torch"])
        with running(rank, world_size, **options):
            lengths.append(len(loader))
            shares.append([batch.tolist() for batch in loader])
    return shares, lengths


def numbers(count: int) -> Any:
    return torch.arange(count)


class ByLength:
    """A batch sampler whose batches differ in size."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4], [5], [6, 7, 8])


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(numbers(37), batch_size=4),
    "shuffled": lambda: DataLoader(numbers(37), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        numbers(37), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "tiny": lambda: DataLoader(numbers(1), batch_size=4),
    "own batches": lambda: DataLoader(numbers(9), batch_sampler=ByLength()),
    "batch sampler": lambda: DataLoader(
        numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    ),
}


@pytest.mark.parametrize("split", [False, True], ids=["rounds", "split"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_sample_is_seen_in_equal_batches(kind: str, world_size: int, split: bool) -> None:
    shares, lengths = deal(LOADERS[kind], world_size, split_batches=split)
    loader = LOADERS[kind]()
    sizes = [list(map(len, share)) for share in shares]
    assert all(size == sizes[0] for size in sizes)
    assert lengths == [len(share) for share in shares]
    seen = [sample for share in shares for batch in share for sample in batch]
    assert {*seen} == {*range(len(loader.dataset))}  # type: ignore[arg-type]
    rounds = len(loader) if split or kind == "own batches" else 1
    assert len(seen) - len({*seen}) <= rounds * (world_size - 1), "padding is no more than it must be"


def test_drop_last_drops_the_incomplete_round() -> None:
    shares, lengths = deal(lambda: DataLoader(numbers(37), batch_size=4, drop_last=True), 2)
    assert lengths == [4, 4]
    assert shares[0] == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]]


def test_padding_is_said() -> None:
    with running(0, 2) as runtime:
        list(DataLoader(numbers(37), batch_size=4))
        notes = runtime.end(True)
    assert [note for note in notes if "1 sample was repeated" in note and "drop_last=True" in note]


def test_effective_batch_is_said() -> None:
    """Without an optimizer the cell may evaluate, and then every rank sees the loader's own batches."""
    loader, pool = DataLoader(numbers(8), batch_size=4), PoolSpec(devices=("cpu", "cpu"))
    with running(0, 2) as runtime:

        def notes(*names: str, **options: Any) -> list[str]:
            return runtime.begin(RunSpec(pool=pool, **options), dict.fromkeys(names, loader))

        assert notes("loader", "other") == ["batch 4 × 2 = 8 where it trains"]
        assert notes("a", accumulate=3) == ["batch 4 × 2 × 3 accumulated = 24 where it trains"]
        runtime.end(True)
        assert notes("a", split_batches=True) == ["batch 4 split over 2 ranks where it trains"]


def test_the_loader_is_untouched_and_torch_is_put_back() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    names = ["__iter__", "_index_sampler"]
    before = [vars(DataLoader)[name] for name in names] + [torch.autograd.backward, torch.nn.utils.clip_grad_norm_]
    inner = dict(vars(_BaseDataLoaderIter))
    loader = DataLoader(numbers(8), batch_size=2, shuffle=True)
    state = dict(vars(loader))
    with running(0, 2) as runtime:
        assert len(list(loader)) == 2
        runtime.install()
    assert vars(loader) == state
    assert dict(vars(_BaseDataLoaderIter)) == inner
    assert before == [vars(DataLoader)[name] for name in names] + [
        torch.autograd.backward,
        torch.nn.utils.clip_grad_norm_,
    ]
    assert len(list(loader)) == 4


def test_no_sampler_none_and_distributed_samplers_are_left_alone() -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    shares, lengths = deal(lambda: DataLoader(numbers(8), batch_size=2), 2, sampler=False)
    assert (shares, lengths) == ([whole, whole], [4, 4])
    shares, _ = deal(lambda: DataLoader(numbers(8), batch_size=2), 2, strategy=NoStrategy(None))
    assert shares == [whole, whole]
    sampler: Any = DistributedSampler(numbers(8), num_replicas=2, rank=1, shuffle=False)
    shares, _ = deal(lambda: DataLoader(numbers(8), batch_size=2, sampler=sampler), 2)
    assert shares[1] == [[1, 3], [5, 7]]


class BatchSamplerShard:
    """accelerate's: every rank takes its own batches of the loader's."""

    def __init__(self, batches: Any, num_processes: int, process_index: int) -> None:
        self.batches, self.num_processes, self.process_index = batches, num_processes, process_index

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.process_index, None, self.num_processes)

    def __len__(self) -> int:
        return len(self.batches) // self.num_processes


class Strided:
    """A sampler of one's own, in the manner of torch's."""

    def __init__(self, count: int, num_replicas: int, rank: int) -> None:
        self.count, self.num_replicas, self.rank = count, num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.count, self.num_replicas))

    def __len__(self) -> int:
        return self.count // self.num_replicas


def test_what_a_sampler_shares_out_already_is_not_shared_out_again() -> None:
    batches = BatchSampler(SequentialSampler(numbers(8)), 2, drop_last=False)
    shares, lengths = deal(lambda: DataLoader(numbers(8), batch_sampler=BatchSamplerShard(batches, 2, 1)), 2)  # type: ignore[arg-type]
    assert (shares, lengths) == ([[[2, 3], [6, 7]]] * 2, [2, 2])
    shares, _ = deal(lambda: DataLoader(numbers(8), batch_size=2, sampler=Strided(8, 2, 1)), 2)  # type: ignore[arg-type]
    assert shares == [[[1, 3], [5, 7]]] * 2
    alone: Any = BatchSamplerShard(batches, 1, 0)
    assert deal(lambda: DataLoader(numbers(8), batch_sampler=alone), 2)[0] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def test_iterable_data_is_dealt_out_and_single_samples_are_left_alone_with_a_note() -> None:
    with running(1, 2) as runtime:
        for _ in range(2):
            assert [batch.tolist() for batch in DataLoader(Stream(), batch_size=1)] == [[1], [3]]
        assert len(list(DataLoader(numbers(3), batch_size=None))) == 3
        notes = runtime.end(True)
    assert len(notes) == 1
    assert "batch_size=None" in notes[0]


class Reacting:
    """Yields what it was last told: a curriculum."""

    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield [self.level]


def test_a_sampler_that_reacts_is_not_asked_ahead_of_its_round() -> None:
    sampler = Reacting()
    loader = DataLoader(numbers(10), batch_sampler=sampler)
    seen = []
    with running(1, 2):
        for batch in loader:
            seen += batch.tolist()
            sampler.level += 1
    assert seen == [0, 1, 2]


def _workers(rank: int) -> list[Any]:
    loader = DataLoader(numbers(16), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    found = []
    for split in (False, True):  # the loader keeps its iterator, and each cell its own way to deal
        torch.manual_seed(7)
        with running(rank, 2, split_batches=split):
            found.append([[batch.tolist() for batch in loader] for _ in range(2)])
    del loader
    return found


def test_persistent_workers_reshuffle_and_follow_each_cell() -> None:
    one, other = run_on_ranks(_workers)
    orders = []
    for cell, size in ((0, 2), (1, 1)):
        for epoch in range(2):
            mine, theirs = one[cell][epoch], other[cell][epoch]
            assert {len(batch) for batch in mine + theirs} == {size}
            assert sorted(sample for batch in mine + theirs for sample in batch) == list(range(16))
            orders.append(mine)
    assert orders[0] != orders[1]


Pair = namedtuple("Pair", "x y")


class WithTo:
    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: torch.device) -> WithTo:
        return WithTo(str(device))


def test_move_keeps_the_batch_as_it_is_built() -> None:
    meta = torch.device("meta")
    x = torch.zeros(3, 2)
    batch = {"pair": Pair(x, [x, (x, "text")]), "own": WithTo(), "n": 3}
    moved = move(batch, meta)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].x.device == moved["pair"].y[0].device == moved["pair"].y[1][0].device == meta
    assert moved["pair"].y[1][1] == "text"
    assert moved["own"].device == meta
    assert moved["n"] == 3
    assert x.device.type == "cpu"
    assert samples_in(batch) == 3
    assert samples_in(["text"]) == 0


class Block(torch.nn.Linear):
    pass


def test_a_runtime_that_ends_in_the_middle_of_a_cell_takes_everything_off() -> None:
    runtime = make_runtime(strategy=DDP(DDP.Options()))
    model = Block(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runtime.install()
    spec = RunSpec(pool=PoolSpec(devices=("cpu",)), accumulate=4, checkpoint_activations=("Block",))
    runtime.begin(spec, {"model": model, "optimizer": optimizer})
    assert ("step" in vars(optimizer), "forward" in vars(Block)) == (True, True)
    runtime.uninstall()
    assert ("step" in vars(optimizer), "forward" in vars(Block)) == (False, False)
