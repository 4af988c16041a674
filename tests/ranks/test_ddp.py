"""ddp: ranks that drift apart are seen, and what cannot be accumulated is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from tests.support.bench import Bench
from tests.support.models import net, train
from tests.support.ranks import run_on_ranks


def _norms(rank: int) -> dict[str, Any]:
    bench = Bench(rank, 2)
    bench.runtime.install()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bench.cell(lambda: train(model, optimizer, bench.loader(), 1), model=model, optimizer=optimizer)
    first = bench.runtime.replica_checksums.take()
    again = bench.runtime.replica_checksums.take()
    bench.cell(lambda: None, model=model, optimizer=optimizer)
    idle = bench.runtime.replica_checksums.take()
    with torch.no_grad():
        model[0].weight[0, 0] += rank
    return {
        "mean": model[1].running_mean,
        "first": first,
        "again": again,
        "idle": idle,
        "apart": bench.runtime.replica_checksums.take(),
    }


def test_checksums_see_ranks_drift_apart_and_leaves_batch_norm_out() -> None:
    one, other = run_on_ranks(_norms)
    assert torch.equal(one["mean"], other["mean"]), "all ranks evaluate the same model"
    assert one["first"] == other["first"]
    names = [name for name, _ in one["first"]]
    assert {"model.0.weight", "model.1.num_batches_tracked"} <= {*names}
    assert "model.1.running_mean" not in names
    assert one["again"] == one["first"][-3:], "as it was looked at last, what was written, and the order of batches"
    assert [name for name, _ in one["idle"]] == names[-3:], "nothing was trained, nothing is looked at"
    differing = [a[0] for a, b in zip(one["apart"], other["apart"], strict=True) if a != b]
    assert differing == ["model.0.weight", "model (all of it)"]


def _twice(rank: int) -> None:
    bench = Bench(rank, 2)
    bench.runtime.install()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for x, _ in bench.loader():
            out = model(x)
            out.square().mean().backward(retain_graph=True)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)


def test_one_forward_through_batch_norm_and_two_backwards() -> None:
    """Between them its statistics are averaged, which autograd is not to take for an edit."""
    run_on_ranks(_twice)


def test_graphs_of_gradients_are_refused_while_batches_are_accumulated() -> None:
    """But for those of the input: a penalty made of them adds up to that of the large batch."""

    def play(bench: Bench, accumulate: int) -> nn.Module:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loop(again: bool) -> None:
            for x, y in bench.loader(batch_size=12 // accumulate):
                x.requires_grad_()
                (slope,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
                loss = F.cross_entropy(model(x), y) + slope.square().sum(1).mean()
                loss.backward(create_graph=again)
                optimizer.step()
                optimizer.zero_grad()

        if accumulate > 1:
            with pytest.raises(NotSupported, match=r"--accumulate adds up.*leave the option out.*, x, create_graph=T"):
                bench.cell(lambda: loop(True), accumulate=accumulate, model=model, optimizer=optimizer)
        bench.cell(lambda: loop(False), accumulate=accumulate, model=model, optimizer=optimizer)
        return model

    expected, found = (Bench().play(lambda bench, k=k: play(bench, k)) for k in (1, 3))
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_accumulation_with_two_optimizers_is_refused() -> None:
    bench = Bench()
    bench.runtime.install()
    model = net()
    one, two = torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.SGD(model.last.parameters(), 0.1)

    def loop() -> None:
        for x, y in bench.loader():
            F.cross_entropy(model(x), y).backward()
            one.step()
            two.step()

    try:
        with pytest.raises(NotSupported, match="two optimizers"):
            bench.cell(loop, accumulate=2, model=model, one=one, two=two)
    finally:
        bench.runtime.uninstall()
    assert "step" not in vars(one)
    assert all(p.grad is None for p in model.first.parameters())
