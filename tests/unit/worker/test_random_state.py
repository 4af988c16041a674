"""Shuffling equals one process, dropout differs between ranks, and the streams go on from cell to cell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.ddp import DDP
from nbtrain.worker.random_states.default_generators import States, capture, packed, restore
from nbtrain.worker.random_states.rank_random_states import Randomness, derive
from nbtrain.worker.runtime import Runtime
from tests.support.bench import make_runtime

SAMPLES = 20


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    before = capture()
    yield
    restore(before)


def run_as(rank: int, world_size: int, states: States, cell: Callable[[Runtime], Any]) -> tuple[Any, States]:
    """The cell as a rank of many runs it. No group is needed: nothing here communicates."""
    runtime = make_runtime(rank, world_size, DDP(DDP.Options()))
    runtime.install()
    try:
        runtime.randomness.adopt(states)
        runtime.begin(RunSpec(pool=PoolSpec(devices=("cpu",) * world_size), strategy="ddp"), {})
        found = cell(runtime)
        runtime.end(True)
        return found, runtime.randomness.collect()
    finally:
        runtime.uninstall()


def notebook() -> States:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    return capture()


class Custom(Sampler[int]):
    """Draws from all three streams, for every sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (int(torch.randint(0, 7, ())) + random.randrange(7) + int(np.random.randint(7))) % SAMPLES


def make_loader(kind: str) -> DataLoader[Any]:
    data: Any = torch.arange(SAMPLES)
    if kind == "shuffle":
        return DataLoader(data, batch_size=4, shuffle=True)
    if kind == "custom":
        return DataLoader(data, batch_size=4, sampler=Custom())
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 10 + [3.0] * 10, SAMPLES)
    return DataLoader(data, batch_size=4, sampler=weights)


def epochs(loader: DataLoader[Any], count: int = 2) -> list[list[int]]:
    return [batch.tolist() for _ in range(count) for batch in loader]


@pytest.mark.parametrize("kind", ["shuffle", "custom", "weighted"])
def test_order_of_two_epochs_equals_one_process(kind: str) -> None:
    states = notebook()
    loader = make_loader(kind)
    expected = epochs(loader)

    def cell(runtime: Runtime) -> list[list[int]]:
        found = []
        for _ in range(2):
            for batch in loader:
                torch.rand(3 + runtime.info.rank)  # dropout, say: it must not change the order
                found.append(batch.tolist())
        return found

    shares = [run_as(rank, 2, states, cell)[0] for rank in range(2)]
    # 5 batches an epoch: two rounds of two, and one batch for both
    assert [shares[0][0], shares[1][0], shares[0][1], shares[1][1]] == expected[:4]
    assert sorted(shares[0][2] + shares[1][2]) == sorted(expected[4])
    assert [shares[0][3], shares[1][3]] == expected[5:7]


def test_two_cells_carry_on_like_one_process() -> None:
    states = notebook()
    loader = make_loader("shuffle")
    expected = epochs(loader, 4)
    at_end = torch.rand(4)
    found = []
    for _ in range(2):
        for rank in (1, 0):
            shares, home = run_as(rank, 2, states, lambda runtime: epochs(loader))
            if rank == 0:
                found.append(shares[0])
        states = home
    assert found == [expected[0], expected[10]]
    restore(states)
    assert torch.initial_seed() == 11, "the notebook's own seed is what torch remembers, not a mark"
    assert torch.equal(torch.rand(4), at_end), "only loaders drew, so the notebook goes on as after one process"


def test_before_the_first_batch_all_ranks_draw_what_one_process_would() -> None:
    states = notebook()
    loader = make_loader("shuffle")
    made = torch.nn.Linear(3, 3).weight.tolist(), torch.randperm(9).tolist(), random.random(), np.random.rand()
    expected, after = epochs(loader), torch.rand(3)

    def cell(runtime: Runtime) -> tuple[Any, list[list[int]]]:
        made = torch.nn.Linear(3, 3).weight.tolist(), torch.randperm(9).tolist(), random.random(), np.random.rand()
        return made, epochs(loader)

    for rank in range(2):
        found, home = run_as(rank, 2, states, cell)
        assert found[0] == made
        assert found[1][:2] == [expected[rank], expected[2 + rank]]
        if rank == 0:
            restore(home)
            assert torch.equal(torch.rand(3), after)


def test_ranks_draw_differently_and_rank_0_carries_on_the_notebook() -> None:
    states = notebook()
    here = (torch.rand(3), random.random(), np.random.rand())

    def cell(runtime: Runtime) -> tuple[torch.Tensor, float, float]:
        torch.zeros(1, requires_grad=True).backward()  # from here on they are apart
        return torch.rand(3), random.random(), np.random.rand()

    (first, home), (second, _), (again, _) = (run_as(rank, 3, states, cell) for rank in (0, 1, 1))
    assert torch.equal(first[0], here[0])
    assert first[1:] == here[1:]
    for one, other in zip(first, second, strict=True):
        assert not np.array_equal(one, other)
    assert torch.equal(second[0], again[0]), "reproducible"
    assert second[1:] == again[1:]
    restore(home)
    after = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(6)[3:], after)


def test_a_seed_set_in_the_cell_starts_the_order_anew_on_every_rank() -> None:
    states = notebook()
    loader = make_loader("shuffle")
    torch.manual_seed(11)
    torch.rand(1)
    expected = epochs(loader, 1)

    def cell(runtime: Runtime) -> list[list[list[int]]]:
        found = []
        for _ in range(2):
            torch.manual_seed(11)  # the notebook's own seed: its number does not change by that
            torch.rand(1)
            found.append(epochs(loader, 1))
        return found

    for rank in range(2):
        (once, again), home = run_as(rank, 2, states, cell)
        assert once == again
        assert once[0] == expected[rank]
        if rank == 0:
            assert home["torch"][:8].view(torch.int64).item() == 11


def test_after_a_seed_set_in_the_cell_dropout_still_differs_between_ranks() -> None:
    states = notebook()
    loader = make_loader("shuffle")

    def cell(runtime: Runtime) -> tuple[list[list[int]], torch.Tensor]:
        torch.manual_seed(3)
        return epochs(loader, 1), torch.rand(3)

    found = [run_as(rank, 3, states, cell)[0] for rank in range(3)]
    torch.manual_seed(3)
    assert found[1][0][0] == epochs(loader, 1)[1], "the order is still the seed's"
    assert len({tuple(drawn.tolist()) for _, drawn in found}) == 3


def test_loader_workers_augment_differently_on_each_rank_and_as_alone_on_rank_0() -> None:
    # num_workers=0 here: what matters is the seed that workers are given
    states = notebook()
    loader = make_loader("shuffle")
    alone = iter(loader)._base_seed  # type: ignore[attr-defined]

    def cell(runtime: Runtime) -> int:
        torch.zeros(1, requires_grad=True).backward()
        before = torch.get_rng_state()
        seed: int = iter(loader)._base_seed  # type: ignore[attr-defined, assignment]
        if runtime.info.rank:
            assert torch.equal(torch.get_rng_state(), before), "the rank's own stream does not notice"
        return seed

    seeds = [run_as(rank, 3, states, cell)[0] for rank in range(3)]
    assert seeds[0] == alone
    assert len({*seeds}) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_model_made_after_an_epoch_is_made_as_by_one_process() -> None:
    states = notebook()
    loader = make_loader("shuffle")
    first, model, second = epochs(loader, 1), torch.rand(3), epochs(loader, 1)

    def cell(runtime: Runtime) -> tuple[torch.Tensor, list[list[int]]]:
        mine = epochs(loader, 1)
        made = torch.rand(3)
        stand = runtime.randomness.one_process_state()  # what `setup` has every rank take from rank 0
        if runtime.info.rank == 0:
            stands.append(stand)
        runtime.randomness.set_one_process_state(stands[0].clone())
        return made, mine + epochs(loader, 1)

    stands: list[torch.Tensor] = []
    (made, lead), _ = run_as(0, 2, states, cell)
    (other, rest), _ = run_as(1, 2, states, cell)
    assert torch.equal(made, model)
    assert not torch.equal(other, model)
    assert [lead[0], rest[0], lead[1], rest[1]] == first[:4]
    assert [lead[3], rest[3], lead[4], rest[4]] == second[:4]


def test_a_runtime_goes_on_with_the_streams_of_the_one_before() -> None:
    states = notebook()
    loader = make_loader("shuffle")
    expected = epochs(loader)

    def cell(runtime: Runtime) -> list[list[int]]:
        first = epochs(loader, 1)
        runtime.end(True)
        other = Runtime(runtime.info, DDP(DDP.Options(bucket_mb=1)), runtime.logged.send, runtime.randomness)
        other.install()
        try:
            other.begin(RunSpec(pool=PoolSpec(devices=("cpu", "cpu")), strategy="ddp"), {})
            return first + epochs(loader, 1)
        finally:
            other.end(True)
            other.uninstall()

    for rank in range(2):
        order = run_as(rank, 2, states, cell)[0]
        assert order[:2] == expected[rank:4:2]
        assert order[3:5] == expected[5 + rank : 9 : 2]


def test_derive_sees_all_of_a_state_however_arrays_are_shown() -> None:
    with np.printoptions(threshold=5):
        for make, draw in ((np.random.RandomState, "get_state"), (random.Random, "getstate")):
            one, other = (getattr(make(seed), draw)() for seed in (1, 2))
            middle = (*one[:1], _with_one_changed(one[1]), *one[2:])
            assert derive(one, 1) == derive(getattr(make(1), draw)(), 1)
            assert len({derive(one, 1), derive(one, 2), derive(other, 1), derive(middle, 1)}) == 4


def _with_one_changed(numbers: Any) -> Any:
    changed = list(numbers)
    changed[300] += 1
    return tuple(changed) if isinstance(numbers, tuple) else np.array(changed, numbers.dtype)


def test_alone_nothing_is_touched() -> None:
    states = notebook()

    def cell(runtime: Runtime) -> int:
        return torch.initial_seed()

    seed, home = run_as(0, 1, states, cell)
    assert seed == 11
    assert home is None, "nobody drew, so there is nothing to tell the notebook"


def test_what_is_adopted_after_a_cell_that_was_given_up_holds() -> None:
    """Its ranks were together to its end: the next cell's are brought together anew."""
    rank = Randomness(1, 2)
    rank.adopt(notebook())
    rank.together()
    rank.adopt(notebook())
    rank.together()
    assert torch.equal(torch.get_rng_state(), notebook()["torch"])


@pytest.mark.parametrize("lacking", [(), ("numpy",), ("numpy", "torch")])
def test_only_what_the_notebook_has_not_loaded_is_made(lacking: tuple[str, ...], monkeypatch: Any) -> None:
    made: list[int] = []
    generator = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda seed: made.append(seed) or generator(seed))
    sent = packed({kind: state for kind, state in notebook().items() if kind not in lacking})
    draws = []
    for _ in range(2):
        Randomness(0, 2).adopt_packed(sent)
        draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert len(made) == 2 * ("numpy" in lacking)
