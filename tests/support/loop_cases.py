"""Loops that tests/lines does not have, played on ranks and in one process: the weights are to be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.strategies.base import Strategy
from nbtrain.strategies.kit.replicated import Replicated
from nbtrain.strategies.zero1 import PreparedZero1
from tests.support.bench import Bench
from tests.support.models import net, train

Weights = dict[str, torch.Tensor]
Case = Callable[[Bench], Weights]


def frozen_then_thawed(bench: Bench) -> Weights:
    model = net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        train(model, optimizer, bench.loader(), 1)
        model.first.requires_grad_(True)
        model.blocks.requires_grad_(False)
        train(model, optimizer, bench.loader(), 1)
        (prepared,) = bench.runtime.components.prepared
        if isinstance(prepared, Replicated | PreparedZero1):
            assert {*prepared.sync.where} == {id(p) for p in model.parameters() if p.requires_grad}

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


def used_on_one_rank(bench: Bench) -> Weights:
    """A layer that only some samples, all of them on one rank, go through; and one that nobody uses."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5)

    def loop() -> None:
        for x, y in bench.loader(batch_size=2):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            if bench.world_size == 1:  # sample 1 is rank 1's
                loss = loss + model(x[1:], spare=True).square().sum()
            elif bench.runtime.info.rank == 1:
                loss = loss + model(x, spare=True).square().sum()
            (loss / 2 * bench.world_size).backward()
            assert model.spare.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        for x, y in bench.loader():
            F.cross_entropy(model(x), y).backward()
            assert model.spare.weight.grad is None, "nobody used it: no zeros, or decay would move it"
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the middle of a backward")


def broken_backward(bench: Bench) -> Weights:
    """A backward that raises half way, caught in the cell, and one that ends the cell; training goes on after both."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def breaks() -> None:
        h = torch.tanh(model.first(bench.data.tensors[0][:4]))
        (model.last(Broken.apply(h))).sum().backward()

    def loop() -> None:
        with pytest.raises(ValueError, match="middle"):
            breaks()
        (prepared,) = bench.runtime.components.prepared
        assert not isinstance(prepared, Replicated | PreparedZero1) or not prepared.sync.armed, (
            "the half backward is forgotten"
        )
        optimizer.zero_grad()
        train(model, optimizer, bench.loader(), 1)

    bench.cell(loop, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="middle"):
        bench.cell(breaks, model=model, optimizer=optimizer)
    optimizer.zero_grad()
    bench.cell(lambda: train(model, optimizer, bench.loader(), 1), model=model, optimizer=optimizer)
    return model.state_dict()


def sparse(bench: Bench) -> Weights:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = torch.arange(24).remainder(10).view(12, 2)

    def loop() -> None:
        for (x,) in DataLoader(TensorDataset(words), batch_size=4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


def channels_last(bench: Bench) -> Weights:
    torch.manual_seed(6)
    model: Any = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0))

    def loop() -> None:
        for (x,) in DataLoader(TensorDataset(images), batch_size=4):
            model(x).square().mean().backward()
            assert model[0].weight.grad.stride() == model[0].weight.stride()
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


def accumulate(bench: Bench) -> Weights:
    """Three batches of 4 are one of 12, the last batch of a loader steps with what there is (8 samples = 2 batches)."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    alone = bench.world_size == 1

    def loop() -> None:
        for x, y in bench.loader(20, 12 if alone else 4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()

    own = dict(vars(optimizer))
    bench.cell(loop, accumulate=1 if alone else 3, model=model, optimizer=optimizer, scheduler=scheduler)
    assert vars(optimizer)["step"] is own["step"], "the scheduler's wrapper is back"
    assert bench.runtime.steps.count == 2
    return {**model.state_dict(), "lr": torch.tensor(scheduler.get_last_lr())}


def accumulate_what_one_rank_used(bench: Bench) -> Weights:
    """A layer that one rank used in the first of two small batches, and nobody in the second."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = bench.data.tensors
    alone, rank = bench.world_size == 1, bench.runtime.info.rank

    def loop() -> None:
        mine = slice(0, 8) if alone else slice(rank * 4, rank * 4 + 4)
        loss = F.cross_entropy(model(x[mine]), y[mine])
        if alone or rank == 1:
            loss = loss + model(x[4:8], spare=True).square().mean() * bench.world_size
        loss.backward()
        optimizer.step()
        F.cross_entropy(model(x[8:]), y[8:]).backward()
        optimizer.step()

    bench.cell(loop, accumulate=2, model=model, optimizer=optimizer)
    assert bench.runtime.steps.count == 1
    return model.state_dict()


def penalty_of_gradients(bench: Bench) -> Weights:
    """A penalty made of `p.grad`, in one backward with the loss and in one of its own; one layer is not used."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def norm() -> torch.Tensor:
        return sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))

    def loop() -> None:
        for number, (x, y) in enumerate(bench.loader()):
            F.cross_entropy(model(x), y).backward(create_graph=True)
            assert model.spare.weight.grad is None
            penalty = norm()
            optimizer.zero_grad()
            if number:
                (F.cross_entropy(model(x), y) + 0.5 * penalty).backward()
            else:
                penalty.backward(create_graph=True)
                (0.1 * norm()).backward()
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    (prepared,) = bench.runtime.components.prepared
    assert not isinstance(prepared, Replicated | PreparedZero1) or not prepared.sync.graphs, "the next cell overlaps"
    return model.state_dict()


def penalty_of_what_one_rank_used(bench: Bench) -> Weights:
    """A penalty made of `p.grad`, of a layer that only one rank went through."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = bench.data.tensors
    alone, rank = bench.world_size == 1, bench.runtime.info.rank

    def loop() -> None:
        mine = slice(0, 8) if alone else slice(rank * 4, rank * 4 + 4)
        loss = F.cross_entropy(model(x[mine]), y[mine])
        if alone or rank == 1:
            loss = loss + model(x[4:8], spare=True).square().mean() * bench.world_size
        loss.backward(create_graph=True)
        penalty = sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))
        optimizer.zero_grad()
        (0.1 * penalty).backward()
        optimizer.step()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


class DiagonalHessian(torch.optim.Optimizer):
    """As AdaHessian: asks, within its step, for a Hessian's diagonal by gradients of `p.grad`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.random = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        signs = [torch.randint(0, 2, p.shape, generator=self.random) * 2.0 - 1 for p in held]
        with torch.enable_grad():
            found = torch.autograd.grad([p.grad for p in held], held, signs)
        for p, sign, product in zip(held, signs, found, strict=True):
            p.sub_(0.1 * p.grad / (1 + (sign * product).abs()))


def hessian_in_a_step(bench: Bench) -> Weights:
    model = net()
    optimizer = DiagonalHessian(model.parameters())

    def loop() -> None:
        for x, y in bench.loader():
            F.cross_entropy(model(x), y).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


CASES = [
    frozen_then_thawed, used_on_one_rank, broken_backward, sparse, channels_last, accumulate,
    accumulate_what_one_rank_used, penalty_of_gradients, penalty_of_what_one_rank_used,
    hessian_in_a_step,
]  # fmt: skip


def play(
    rank: int, world_size: int, cases: Iterable[Case], make: Callable[[], Strategy] | None = None
) -> dict[str, Weights]:
    """What each case leaves on this rank, under strategies that `make` makes; of one process, under `single`."""
    found = {}
    for case in cases:
        bench = Bench(rank, world_size, make() if make is not None and world_size > 1 else None)
        found[case.__name__] = bench.play(
            lambda bench, case=case: {name: value.detach().clone() for name, value in case(bench).items()}
        )
    return found


@cache
def alone(case: Case) -> Weights:
    return Bench().play(case)


def check_case(case: Case, ranks: list[dict[str, Weights]], dealt_out: str = "none of them") -> None:
    """All ranks have what one process has, and the same to the last bit; names that begin with `dealt_out` aside."""
    expected = alone(case)
    for found in ranks:
        assert found[case.__name__].keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith(dealt_out):
                torch.testing.assert_close(found[case.__name__][name], value, rtol=1e-5, atol=1e-5)
    for name in (name for name in expected if not name.startswith(dealt_out)):
        assert torch.equal(ranks[0][case.__name__][name], ranks[1][case.__name__][name]), name
