"""A round of as many batches as ever, cut over more or fewer ranks than it was made for."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from nbtrain.worker.data.batch_dealing import Dealt
from nbtrain.worker.parts import Deal
from nbtrain.worker.random_states.rank_random_states import Randomness


def shares(samples: int, size: int, ranks: int, each: int, drop_last: bool = False) -> list[list[list[int]]]:
    """What each rank gets, batch by batch."""
    found = []
    for rank in range(ranks):
        batches = BatchSampler(SequentialSampler(range(samples)), size, drop_last)
        deal = Deal(index=rank, count=ranks, each=each) if ranks > 1 else Deal(index=0, count=each, whole=True)
        dealt = Dealt(batches, deal, Randomness(rank, ranks), drop_last=drop_last)
        got = [list(batch) for batch in dealt]
        assert len(dealt) == len(got)
        found.append(got)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_step_takes_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    found = shares(samples=48, size=6, ranks=ranks, each=4)
    for step in range(2):
        together = sorted(sample for rank in found for sample in rank[step])
        assert together == list(range(24 * step, 24 * step + 24))
        assert {len(rank[step]) for rank in found} == {24 // ranks}


def test_a_round_that_cannot_be_cut_evenly_is_filled_up() -> None:
    found = shares(samples=16, size=4, ranks=3, each=4)
    assert [len(rank[0]) for rank in found] == [6, 6, 6]
    assert {sample for rank in found for sample in rank[0]} == set(range(16))


def test_the_last_round_has_what_is_left_or_is_dropped() -> None:
    found = shares(samples=30, size=5, ranks=2, each=4)
    assert sorted(sample for rank in found for sample in rank[1]) == list(range(20, 30))
    assert [len(rank) for rank in shares(samples=30, size=5, ranks=2, each=4, drop_last=True)] == [1, 1]


def test_as_many_batches_as_ranks_are_dealt_out_whole() -> None:
    assert shares(samples=16, size=4, ranks=2, each=2) == shares(samples=16, size=4, ranks=2, each=0)
