"""`--accumulate` where gradients lie on several ranks: norms by hand, and gradients that a loop clears by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.machine.registry import make_strategy
from tests.support.bench import cell, rank_info
from tests.support.ranks import run_on_ranks

Loop = Callable[[nn.Module, torch.optim.Optimizer, list[torch.Tensor], list[float]], None]
Found = tuple[str, list[float], torch.Tensor]

STRATEGIES = ["ddp", "zero1", "sharded", "fsdp", "pipeline", "deepspeed"]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 4, generator=generator) * 3 for _ in range(4)]


def clipped_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], norms: list[float]
) -> None:
    for x in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :3]).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        norms.append(float(norm))
        optimizer.step()


def cleared_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], norms: list[float]
) -> None:
    for x in batches:
        for p in model.parameters():
            p.grad = None
        F.mse_loss(model(x), x[:, :3]).backward()
        optimizer.step()


def alone(loop: Loop, every: int) -> tuple[list[float], torch.Tensor]:
    """One process, with the large batches."""
    (model, optimizer), small = make(), batches()
    norms: list[float] = []
    loop(model, optimizer, [torch.cat(small[i : i + every]) for i in range(0, len(small), every)], norms)
    return norms, torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(rank: int, name: str, loop: Loop, every: int) -> Found:
    """What was raised, the norms, the weights."""
    model, optimizer = make()
    norms: list[float] = []
    strategy: Any = make_strategy(name, {}, {})
    strategy.place = rank_info(rank, 2)
    said = ""
    with cell(rank, 2, strategy, RunSpec(pool=PoolSpec(), accumulate=every), model=model, optimizer=optimizer):
        try:
            loop(model, optimizer, [x if name == "pipeline" else x[rank::2] for x in batches()], norms)
        except (NotSupported, UsageError) as error:
            said = str(error)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return said, norms, torch.cat([p.detach().flatten() for p in weights])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_norm_by_hand_is_the_whole_ones_or_is_refused(name: str, every: int) -> None:
    norms, weights = alone(clipped_by_hand, every)
    for said, found, after in run_on_ranks(trained, name, clipped_by_hand, every):
        if name in ("sharded", "deepspeed"):
            assert "clip_grad_norm_ returns their norm" in said
            continue
        assert not said
        assert found[every - 1 :: every] == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(after, weights)


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_cleared_by_hand_within_a_group_are_missed_or_were_elsewhere(name: str) -> None:
    _, weights = alone(cleared_by_hand, 2)
    for said, _, after in run_on_ranks(trained, name, cleared_by_hand, 2):
        if name == "fsdp":  # holds them back, where the loop does not reach them
            torch.testing.assert_close(after, weights)
        else:
            assert "Write optimizer.zero_grad() or model.zero_grad()" in said
