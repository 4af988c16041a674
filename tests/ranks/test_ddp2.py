"""ddp2: a batch is cut over the ranks of a node, and gradients are averaged over the nodes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component, Prepared, share_of
from nbtrain.strategies.ddp2 import DDP2, PreparedDDP2
from nbtrain.strategies.kit import split_batch
from tests.support.bench import rank_info
from tests.support.ranks import run_on_ranks

X = torch.randn(14, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(14) % 3


class TwoOutputs(nn.Module):
    """Of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.last(hidden), hidden.argmax(1)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Samples see each other, and a weight is used outside of the model."""
    logits, _ = model(x)
    return F.cross_entropy(logits, y) + (logits @ logits.T).logsumexp(1).mean() + model.last.weight.square().sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@contextmanager
def cell(model: nn.Module, rank: int, world: int, nodes: int, **options: Any) -> Iterator[tuple[Prepared, slice]]:
    """What is prepared, and the rows of this node."""
    strategy = DDP2(DDP2.Options(**options))
    strategy.place = rank_info(rank, world, local_rank=rank % (world // nodes), nodes=nodes)
    prepared = strategy.set_up(Component(modules={"model": model}))
    node, count = share_of(strategy, rank, world)
    prepared.enter()
    yield prepared, slice(node * len(X) // count, (node + 1) * len(X) // count)
    prepared.leave()
    assert "_call_impl" not in vars(model)
    prepared.close()


def _trains(rank: int, world: int, nodes: int) -> None:
    model = TwoOutputs()
    per = len(X) // nodes
    sum(loss(model, X[i : i + per], Y[i : i + per]) / nodes for i in range(0, len(X), per)).backward()
    wanted = gradients(model)
    with cell(model, rank, world, nodes, bucket_mb=0.0002) as (_, rows):
        x, y = X[rows], Y[rows]
        for _ in range(2):
            assert nodes == world or "Gathered" in model(x)[0].grad_fn.name()
            loss(model, x, y).backward()
            for found, one in zip(gradients(model), wanted, strict=True):
                assert torch.allclose(found, one, atol=1e-6)
        # What is differentiated with respect to the batch is computed whole, and so is what is too small.
        given = x.clone().requires_grad_()
        loss(model, given, y).backward()
        assert given.grad is not None
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(model), wanted, strict=True))
        with torch.no_grad():
            assert [len(t) for t in model(x)] == [per, per]
        assert len(model(x[:1])[0]) == 1


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (4, 2), (2, 2)])
def test_a_nodes_batch_counts_as_one_and_nodes_are_averaged(world: int, nodes: int) -> None:
    run_on_ranks(_trains, world, nodes, world_size=world)


def _drops(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = TwoOutputs()
    model.drop.p = 0.5
    with cell(model, rank, 2, 1):
        x = X[:1].expand(8, 6)
        return [model(x)[0].detach(), model(x)[0].detach(), torch.rand(2)]


def test_ranks_of_a_node_leave_out_other_numbers_and_see_one_result() -> None:
    first, second = run_on_ranks(_drops)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0][:4], first[0][4:])
    assert not torch.equal(first[0], first[1])


class Picks(TwoOutputs):
    """Draws for some samples only."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x + 0 * torch.rand(()) if x.min() > 0 else x)


def _draws_alone(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = Picks()
    with cell(model, rank, 2, 1):
        x = torch.cat([torch.zeros(4, 6), torch.ones(4, 6)])
        out = model(x)[0]
        assert "Gathered" in out.grad_fn.name()
        return [out.detach(), torch.rand(2)]


def test_a_draw_for_the_part_of_one_rank_does_not_part_the_others() -> None:
    first, second = run_on_ranks(_draws_alone)
    assert all(map(torch.equal, first, second))


def _goes_wrong(rank: int) -> list[str]:
    model, said = TwoOutputs(), []
    with cell(model, rank, 2, 1):
        given = X[:8] if rank else X[4:12]
        with pytest.raises(NotSupported) as caught:
            model(given)
        said.append(str(caught.value))
        out = model(X)[0].sum()
        (slope,) = torch.autograd.grad(out, model.last.weight, retain_graph=True)
        assert slope.shape == (3, 8)
        with pytest.raises(NotSupported) as caught:
            torch.autograd.grad(out, model.last.weight, create_graph=True)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_is_said() -> None:
    for different, twice in run_on_ranks(_goes_wrong):
        assert "see different batches: rank 0 calls a model with 8 samples" in different
        assert "below `if rank == 0:` write `with torch.random.fork_rng():`" in different
        assert "--strategy ddp" in different
        assert "--strategy dp and --strategy ddp can" in twice


def _is_gone(rank: int) -> tuple[bool, bool]:
    """A model that nobody holds, and what was known of it; the other one is cut on."""
    kept, gone = TwoOutputs(), TwoOutputs()
    number = id(gone)
    strategy = DDP2(DDP2.Options())
    strategy.place = rank_info(rank, 2)
    component = Component(modules={"kept": kept, "gone": gone})
    prepared = strategy.set_up(component)
    assert isinstance(prepared, PreparedDDP2)
    prepared.enter()
    kept(X), gone(X)
    hold_again = prepared.release_modules()
    del component.modules["gone"], gone
    gc.collect()
    assert hold_again() is prepared
    known = number in split_batch._cutting or any(key[0] == number for key in prepared.calls.plans)
    cut = "Gathered" in str(kept(X)[0].grad_fn)
    prepared.leave()
    assert "_call_impl" not in vars(kept)
    prepared.close()
    return known, cut


def test_a_model_that_nobody_holds_is_let_go_of() -> None:
    assert run_on_ranks(_is_gone) == [(False, True)] * 2
