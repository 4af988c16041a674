"""Lines that people write, under fsdp, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.fsdp import Numbers, Stage, net, numbers, on_ranks, same

pytestmark = pytest.mark.thorough


def learn(stage: Stage, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for x, y in stage.batches(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(stage: Stage, model: nn.Module, kind: Callable[..., Any] = torch.optim.SGD, rate: float = 0.1) -> Any:
    optimizer = kind(model.parameters(), lr=rate)
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    return optimizer, prepared


def pictures(stage: Stage) -> Numbers:
    """Weights laid out otherwise, state from before; a part of a Sequential; rows that are fewer than ranks."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 1))
    model = body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    prepared = stage.set_up([model], [optimizer])
    prepared.enter()
    x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))[stage.rank :: stage.count]
    for _ in range(2):
        (model(x) + model[3](model[:3](x))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def words(stage: Stage) -> Numbers:
    """Sparse gradients: that table stays whole."""
    torch.manual_seed(0)
    model = Words()
    optimizer, prepared = begun(stage, model)
    for _ in range(2):
        model(torch.arange(8)[stage.rank :: stage.count]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


class Heated(nn.Module):
    """The first parameter has no dimensions, and is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        return self.head(x) * self.heat


def measured(stage: Stage) -> Numbers:
    """A metric between backward and step, without no_grad."""
    torch.manual_seed(0)
    model = Heated()
    optimizer, prepared = begun(stage, model)
    for x, y in stage.batches(3):
        F.cross_entropy(model(x), y).backward()
        model(x)
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    found = numbers(prepared)
    del found["model0.norm.running_var"]  # of each rank's share
    return found


def over_cells(stage: Stage) -> Numbers:
    """A backward in one cell, then a forward that raises, and the step in another."""
    model = net()
    optimizer, prepared = begun(stage, model)
    x, y = stage.batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    prepared.leave()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    prepared.enter()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    optimizer.step()
    learn(stage, model, optimizer)
    prepared.leave()
    return numbers(prepared)


class Choosing(nn.Module):
    """Ranks use other parameters of one unit; one parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.left, self.right = nn.Parameter(torch.ones(8, 3)), nn.Parameter(torch.ones(8, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return torch.tanh(self.first(x)) @ (self.left if left else self.right)


def waiting(stage: Stage) -> Numbers:
    """Batches without communication first; what they use is not the same everywhere."""
    torch.manual_seed(0)
    model = Choosing()
    optimizer, prepared = begun(stage, model)
    batches = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for rank in [stage.rank] if stage.count > 1 else range(2):
            share = 1 if stage.count > 1 else 0.5
            with prepared.backward(False):
                (model(batches[0, rank], rank == 0).square().mean() * share).backward()
                (model(batches[1, rank], True).square().mean() * share).backward()
            (model(batches[2, rank], rank == 0).square().mean() * share).backward()
        assert model.unused.grad is None
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


@pytest.mark.parametrize(("options", "near"), [({}, 1e-5), ({"comm_dtype": "bf16"}, 0.05)], ids=str)
def test_gradients_that_wait_in_any_type(options: dict[str, Any], near: float) -> None:
    alone = waiting(Stage(False))
    for found in on_ranks(waiting, **options):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, atol=near, rtol=near)


def in_vain(stage: Stage) -> Numbers:
    """A layer whose output goes nowhere; gradients are reduced in another type than they are computed in."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.vain = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.vain(x)
            return self.used(x)

    torch.manual_seed(0)
    model = Pair().bfloat16()
    optimizer, prepared = begun(stage, model)
    for x, y in stage.batches(2):
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        assert model.vain.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    prepared.leave()
    return numbers(prepared)


def test_a_layer_in_vain_where_gradients_are_reduced_in_another_type() -> None:
    alone = in_vain(Stage(False))
    for found in on_ranks(in_vain, comm_dtype="fp32"):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, atol=0.05, rtol=0.05)


def test_a_first_parameter_without_dimensions() -> None:
    same(measured, sharding="SHARD_GRAD_OP")


CASES = [pictures, words, over_cells]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_like_one_process(case: Callable[[Stage], Numbers]) -> None:
    same(case)
