"""zero1 with optimizers whose state is not like Adam's, and with a step that raises."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nbtrain.strategies.zero1 import Zero1
from tests.support.bench import Bench
from tests.support.loop_cases import Weights, play
from tests.support.models import net, train
from tests.support.ranks import run_on_ranks


def make() -> Zero1:
    return Zero1(Zero1.Options(bucket_mb=0.0005))


def _raises(bench: Bench) -> Weights:
    """A step raises, and the loop goes on: every gradient is zeroed all the same."""
    model = net()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([first], 0.01, momentum=0.9)

    def loop() -> None:
        optimizer.add_param_group({"params": others, "lr": 0.02})
        for number, (x, y) in enumerate(bench.loader()):
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step(lambda at=number: 1 / (at - 1))
            except ZeroDivisionError:
                optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert "zero_grad" not in vars(optimizer)
    return dict(model.named_parameters())


def _adafactor(bench: Bench) -> Weights:
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    bench.cell(lambda: train(model, optimizer, bench.loader()), model=model, optimizer=optimizer)
    return dict(model.named_parameters())


def _muon(bench: Bench) -> Weights:
    model = net()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 1e-2)
    bench.cell(lambda: train(model, optimizer, bench.loader()), model=model, optimizer=optimizer)
    return dict(model.named_parameters())


OTHERS = (_raises, _adafactor, *([_muon] if hasattr(torch.optim, "Muon") else []))


def test_other_optimizers_equal_one_process() -> None:
    expected = play(0, 1, OTHERS)
    for found in run_on_ranks(play, 2, OTHERS, make):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
