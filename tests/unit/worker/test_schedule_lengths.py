"""Which schedules are found to end half way, as a table: what a notebook makes, and how far the cell has moved it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

from nbtrain.exchange.kinds.modules_and_optimizers import SCHEDULES_SENT
from nbtrain.worker.loop.schedule_lengths import length_of, short_schedules, standing
from nbtrain.worker.loop.steps import Steps

BATCHES, EPOCHS, RANKS = 20, 3, 2
WHOLE = BATCHES * EPOCHS
OWN = WHOLE // RANKS


def linear(step: int, warm: int, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def warmed(opt: Any) -> Any:
    parts = [schedules.LinearLR(opt, total_iters=6), schedules.CosineAnnealingLR(opt, WHOLE - 6)]
    return schedules.SequentialLR(opt, parts, [6])


def found(make: Callable[[Any], Any], moved: int, *, made_in_cell: bool = False, trial: bool = False) -> list[str]:
    loader, steps = DataLoader(list(range(BATCHES))), Steps(0)
    opt = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    schedule = make(opt)
    if not made_in_cell:
        SCHEDULES_SENT.add(schedule)
    before = {} if made_in_cell else standing({"s": schedule})
    steps.epochs[loader] = 0 if trial else EPOCHS - 1
    for _ in range(1 if trial else EPOCHS):
        iterator = iter(loader)
        steps.opened(iterator, loader)
        steps.asked(iterator)
        if not trial:
            steps.exhausted(iterator)
    steps.epochs[loader] = 0 if trial else EPOCHS - 1
    for _ in range(moved):
        opt.step()
        schedule.step()
    return [one.sentence(RANKS, 1) for one in short_schedules(before, standing({"s": schedule}), steps, RANKS, trial)]


SHORT: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda opt: schedules.OneCycleLR(opt, 1.0, epochs=EPOCHS, steps_per_epoch=BATCHES),
    "cosine": lambda opt: schedules.CosineAnnealingLR(opt, T_max=WHOLE),
    "polynomial": lambda opt: schedules.PolynomialLR(opt, WHOLE),
    "of transformers": lambda opt: schedules.LambdaLR(opt, partial(linear, warm=6, num_training_steps=WHOLE)),
    "warm-up, then cosine": warmed,
}


@pytest.mark.parametrize("make", SHORT.values(), ids=SHORT)
def test_a_schedule_for_all_batches_ends_half_way(make: Callable[[Any], Any]) -> None:
    (said,) = found(make, OWN)
    assert f"has moved {OWN} of its {WHOLE} steps: each step uses 2 batches" in said
    assert "Make it inside the cell, where len(loader) is the number of steps, or write --split-batches" in said
    (said,) = found(make, 3, trial=True)
    assert f"has moved 3 of its {WHOLE} steps" in said


def test_one_of_schedules_that_move_together_is_as_long_as_the_longest() -> None:
    opt = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    parts = [schedules.ConstantLR(opt, total_iters=6), schedules.CosineAnnealingLR(opt, WHOLE)]
    assert length_of(schedules.ChainedScheduler(parts)) == WHOLE


def test_one_whose_length_is_not_known_is_said_with_an_if() -> None:
    assert len(found(lambda opt: schedules.LambdaLR(opt, lambda step: 1 - step / WHOLE), OWN)) == 1
    (said,) = found(lambda opt: schedules.StepLR(opt, 7), OWN)
    assert f"s (StepLR) has moved {OWN} steps" in said
    assert "If its length comes from len(loader), make it inside the cell" in said


FINE: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "counts epochs": (lambda opt: schedules.CosineAnnealingLR(opt, EPOCHS), {"moved": EPOCHS}),
    "has come to its end": (lambda opt: schedules.OneCycleLR(opt, 1.0, OWN), {"moved": OWN}),
    "made in the cell": (lambda opt: schedules.OneCycleLR(opt, 1.0, OWN), {"moved": OWN, "made_in_cell": True}),
    "stopped early": (lambda opt: schedules.CosineAnnealingLR(opt, OWN), {"moved": 25, "made_in_cell": True}),
    "without a length, in a trial": (lambda opt: schedules.StepLR(opt, 7), {"moved": 3, "trial": True}),
    "for ranks, in a trial": (lambda opt: schedules.OneCycleLR(opt, 1.0, OWN), {"moved": 3, "trial": True}),
}


@pytest.mark.parametrize(("make", "how"), FINE.values(), ids=FINE)
def test_nothing_is_said_of(make: Callable[[Any], Any], how: dict[str, Any]) -> None:
    assert found(make, **how) == []


def test_one_made_in_the_cell_with_the_notebooks_number() -> None:
    assert len(found(lambda opt: schedules.OneCycleLR(opt, 1.0, WHOLE), OWN, made_in_cell=True)) == 1
