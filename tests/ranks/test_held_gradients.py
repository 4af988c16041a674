"""A gradient that the loop holds stays the parameter's gradient, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain import registry
from tests.support.bench import Bench
from tests.support.ranks import run_on_ranks, without_group


def _held(rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    def program(bench: Bench) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # all of it is used
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = bench.loader()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        grads = [p.grad for p in model.parameters()]

        def loop() -> None:
            for x, y in loader:
                for grad in grads:
                    grad.zero_()
                F.cross_entropy(model(x), y).backward()
                for grad in grads:
                    grad.clamp_(max=0.01)
                optimizer.step()

        bench.cell(loop, model=model, optimizer=optimizer)
        return model.state_dict()

    return Bench(rank, world_size, registry.make_strategy(strategy, {}, {}) if world_size > 1 else None).play(program)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_it_is_zeroed_and_clamped_by_whoever_holds_it(strategy: str) -> None:
    (alone,) = run_on_ranks(without_group, _held, 1, strategy, world_size=1)
    for weights in run_on_ranks(_held, 2, strategy):
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name])
