"""What is measured of the steps of a trial, and what a trial may not do."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from nbtrain.base.specs import Trial
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.measure.trial_steps import Regrouped, TrialSteps


def trial_steps(**what: int) -> tuple[TrialSteps, Steps]:
    seconds = iter(range(100))
    steps = Steps(0)
    found = TrialSteps(Trial(**what), torch.device("cpu"), clock=lambda: float(next(seconds)))
    found.begin(steps)
    return found, steps


def test_steps_after_the_first_are_timed() -> None:
    found, steps = trial_steps(steps=3, warm=2)
    for _ in range(4):
        steps.got(8)
        assert not found.ended()
    steps.got(8)
    assert found.ended()
    told = found.told(0)
    assert (told.steps, told.seconds, told.samples, told.batch) == (3, 3.0, 24, 8)


@pytest.mark.parametrize(("ends", "timed"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2)])
def test_a_shorter_loop_is_timed_for_what_it_had(ends: int, timed: int) -> None:
    found, steps = trial_steps(steps=10, warm=2)
    for _ in range(ends):
        steps.got(8)
        found.ended()
    told = found.told(0)
    assert (told.steps, told.seconds) == (timed, float(timed))


def test_memory_is_what_came_besides() -> None:
    found, _ = trial_steps(steps=1)
    held = torch.ones(25_000_000)
    found.ended()
    del held
    assert 80e6 < found.told(0).memory < 140e6


def test_what_a_trial_may_not_have_raises_and_is_there_afterwards() -> None:
    found = TrialSteps(Trial(steps=1, memory=50_000_000), torch.device("cpu"))
    with found.limited(), pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.ones(50_000_000)
    assert torch.ones(50_000_000).numel() == 50_000_000


@pytest.mark.parametrize("factor", [0.25, 1.5, 4.0, 40.0])
def test_batches_of_another_size_have_the_same_samples(factor: float) -> None:
    batches = BatchSampler(SequentialSampler(range(30)), 4, drop_last=False)
    found = list(Regrouped(batches, factor))
    assert len(found) == len(batches)
    for number, batch in enumerate(found):
        size = int(4 * factor)
        assert batch == [(number * size + at) % 30 for at in range(size)]
    several = iter(Regrouped(BatchSampler(RandomSampler(range(30)), 4, drop_last=False), factor))
    assert len(next(several)) == round(4 * factor)
    assert list(Regrouped(BatchSampler(SequentialSampler([]), 4, drop_last=False), factor)) == []
