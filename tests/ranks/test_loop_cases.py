"""The loops of tests/support/loop_cases.py, under strategies that average gradients: the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.strategies.base import Strategy
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.horovod import Horovod
from nbtrain.strategies.sharded import Sharded
from nbtrain.strategies.zero1 import Zero1
from tests.support.absent import absent
from tests.support.bench import Bench
from tests.support.loop_cases import (
    CASES,
    Case,
    Weights,
    broken_backward,
    channels_last,
    check_case,
    penalty_of_gradients,
    penalty_of_what_one_rank_used,
    play,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


def held_gradients(bench: Bench) -> Weights:
    """A gradient that the loop holds stays the parameter's: it is zeroed and clamped by whoever holds it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # all of it is used
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in model.parameters() if p.grad is not None]

    def loop() -> None:
        for x, y in bench.loader():
            for grad in grads:
                grad.zero_()
            F.cross_entropy(model(x), y).backward()
            for grad in grads:
                grad.clamp_(max=0.01)
            optimizer.step()

    bench.cell(loop, model=model, optimizer=optimizer)
    return model.state_dict()


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDP(DDP.Options()),
    "zero1": lambda: Zero1(Zero1.Options(bucket_mb=0.0005)),
    "sharded": lambda: Sharded(Sharded.Options()),
    "horovod": lambda: Horovod(bucket_mb=0.0005),
}
NEEDS = {
    "sharded": {"fairscale": "pip install --no-build-isolation fairscale"},
    "horovod": {"horovod": ".ci/horovod builds it"},
}
OWNED_GRADIENTS = {"sharded": (channels_last, penalty_of_gradients, penalty_of_what_one_rank_used, held_gradients)}
"""These look at gradients, which only their owners have."""
ROWS = [
    (name, case)
    for name in ("ddp", "zero1", "sharded")
    for case in (*CASES, held_gradients)
    if case not in OWNED_GRADIENTS.get(name, ())
] + [("horovod", broken_backward)]  # what is on its way there is Horovod's


@pytest.fixture(scope="module")
def played() -> dict[str, list[dict[str, Weights]]]:
    """What the ranks of a strategy have got, once they were asked."""
    return {}


@pytest.mark.parametrize(("strategy", "case"), ROWS, ids=lambda one: getattr(one, "__name__", one))
def test_equals_one_process(strategy: str, case: Case, played: dict[str, list[dict[str, Weights]]]) -> None:
    for package, how in NEEDS.get(strategy, {}).items():
        if find_spec(package) is None:
            absent(f"{package} is not installed", how)
    if strategy not in played:
        cases = [case for name, case in ROWS if name == strategy]
        played[strategy] = run_on_ranks(play, 2, cases, STRATEGIES[strategy])
    check_case(case, played[strategy], "none of them" if strategy == "ddp" else "state ")
