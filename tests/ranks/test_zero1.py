"""zero1 with optimizers whose state is not like Adam's: some of the user's, Adafactor, Muon."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from nbtrain.strategies.kit import divided_steps
from nbtrain.strategies.zero1 import Zero1
from tests.support.bench import Bench
from tests.support.loop_cases import Weights, play
from tests.support.models import net, train
from tests.support.ranks import run_on_ranks


def make() -> Zero1:
    return Zero1(Zero1.Options(bucket_mb=0.0005))


class Own(torch.optim.Optimizer):
    """A user's: its state comes with the first gradient, and now and then it raises."""

    raises = False

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Own.raises:
            raise ZeroDivisionError
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 / state["step"])
                p.sub_(state["mean"], alpha=group["lr"])


def _own(bench: Bench) -> Weights:
    """A step raises, and the loop goes on: every gradient is zeroed all the same."""
    model = net()
    first, *others = model.parameters()
    optimizer = Own([first])

    def loop() -> None:
        optimizer.add_param_group({"params": others, "lr": 0.02})
        for number, (x, y) in enumerate(bench.loader()):
            Own.raises = number == 1
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except ZeroDivisionError:
                optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()

    bench.cell(loop, model=model, optimizer=optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert "zero_grad" not in vars(optimizer)
    return dict(model.named_parameters())


def _own_divided(bench: Bench) -> Weights:
    """The same, if it were known to treat each parameter by itself, as one that takes over torch's step is."""
    with mock.patch.object(divided_steps, "steps_each_alone", return_value=True):
        return _own(bench)


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


OTHERS = (_own, _own_divided, _adafactor, *([_muon] if hasattr(torch.optim, "Muon") else []))


def test_other_optimizers_equal_one_process() -> None:
    expected = play(0, 1, OTHERS)
    for found in run_on_ranks(play, 2, OTHERS, make):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
