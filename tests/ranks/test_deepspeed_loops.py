"""Models made in a loop, under DeepSpeed: those that nobody holds go, the others train as in one process."""

from __future__ import annotations

import os
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from nbtrain.strategies.deepspeed import DeepSpeed
from nbtrain.worker.setup.components import Components
from tests.support.deepspeed import SHARDED, deepspeed_here  # noqa: F401
from tests.support.ranks import run_on_ranks

FOLDS = 3


def folds(rank: int, stage: int, precision: str, keep: str, alone: bool) -> tuple[list[int], list[float]]:
    """How many models there were when each optimizer was made, and losses. `keep`: what is held of the second one; the
    whole model takes another step at the end."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    components = None
    before = os.environ.get("RANK")
    if not alone:
        strategy = DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED))
        components = Components(strategy, torch.device("cpu"), 2, precision=precision)
        components.enter()
    made: list[Any] = []
    alive, losses = [], []
    kept: list[Any] = []

    def step(model: Any, optimizer: torch.optim.Optimizer, to_sweep: bool = False) -> None:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if components is not None and to_sweep:  # a checkpoint may be made anywhere
            components.sweep()
        optimizer.step()
        optimizer.zero_grad()

    for fold in range(FOLDS):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        made.append(ref(model))
        new = torch.optim.AdamW(model.parameters(), 0.01)
        if components is not None:  # the last optimizer is still there: a loop gives its name away afterwards
            components.sweep()
            components.prepare({"model": model, "optimizer": new})
        alive.append(sum(one() is not None for one in made))
        optimizer = new
        for at in range(3):
            step(model, optimizer, at == 1)
        if keep and fold == 1:
            kept += [model, optimizer] if keep == "model" else [model[0]]
    if keep == "model":
        step(*kept)
    if components is not None:
        components.leave()
        assert len(components.kept) == 1 + bool(keep)
        components.forget(False)
        assert os.environ.get("RANK") == before
    return alive, losses


@pytest.mark.sample("1-32")
@pytest.mark.parametrize(("stage", "precision"), [(1, "32"), (2, "bf16-true"), (3, "bf16-true")])
def test_what_nobody_holds_goes(stage: int, precision: str) -> None:
    _, wanted = folds(0, stage, precision, "", True)
    for alive, losses in run_on_ranks(folds, stage, precision, "", False):
        assert alive == [1] * FOLDS
        assert losses == pytest.approx(wanted, rel=1e-5 if precision == "32" else 0.05)


@pytest.mark.sample("part")
@pytest.mark.parametrize("keep", ["model", "part"])
def test_what_somebody_holds_stays(keep: str) -> None:
    _, wanted = folds(0, 3, "32", keep, True)
    for alive, losses in run_on_ranks(folds, 3, "32", keep, False):
        assert alive == [1, 1, 2]
        assert losses == pytest.approx(wanted, rel=1e-5)
