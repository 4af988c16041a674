"""How much is computed: counted early, for nothing, and never at the price of another result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import nbtrain.machine.registry as registry
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.worker.measure.flop_count import peak
from nbtrain.worker.runtime import Runtime
from tests.support.bench import make_runtime, rank_info
from tests.support.ranks import run_on_ranks

SPEC = RunSpec(pool=PoolSpec())
X, Y = torch.randn(16, 8), torch.randint(0, 4, (16,))
FORWARD = 2 * 16 * (8 * 32 + 32 * 4)
LINEAR = 3 * FORWARD - 2 * 16 * 8 * 32
"""The backward is twice the forward, but for the gradient of the data, which nobody wants."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """A rank that has compiled anything counts no more; this process may have, in another test."""
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    here = make_runtime()
    here.install()
    here.begin(SPEC, {})
    yield here
    here.end(True)
    here.uninstall()
    assert _get_current_dispatch_mode() is None


def train(model: nn.Module, steps: int, x: torch.Tensor = X, y: torch.Tensor = Y) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_was_counted_is_multiplied(runtime: Runtime) -> None:
    train(net(), 3)
    assert runtime.operations.total == 0, "not counted yet"
    train(net(), 7)
    assert runtime.operations.total == 10 * LINEAR
    assert runtime.operations.fastest == 0, "of a CPU it is not known"
    assert _get_current_dispatch_mode() is None, "only two steps are slower"


def test_attention_counts(runtime: Runtime) -> None:
    query = torch.randn(2, 4, 10, 16, requires_grad=True)
    for _ in range(4):
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    with FlopCounterMode(display=False) as plain:
        scores = (query @ query.transpose(2, 3)).softmax(-1)
        (scores @ query).sum().backward()
    forward_and_backward = plain.get_total_flops()
    assert forward_and_backward <= runtime.operations.total / 4 <= 1.5 * forward_and_backward


def test_a_short_evaluation_in_between_is_no_part_of_a_step(runtime: Runtime) -> None:
    model = net()
    train(model, 2)
    for (x,) in DataLoader(TensorDataset(torch.randn(3, 8)), 1):
        model(x)
    train(model, 3)
    assert runtime.operations.total == 5 * LINEAR


def test_what_nobody_can_count_makes_no_number(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.worker.measure.flop_count.UNKNOWN", frozenset([torch.ops.aten.tanh]))
    train(net(), 6)
    assert runtime.operations.total == 0


def test_a_mode_of_the_users_is_left_alone(runtime: Runtime) -> None:
    model = net()
    with FlopCounterMode(display=False) as theirs:
        train(model, 6)
    assert theirs.get_total_flops() == 6 * LINEAR
    assert runtime.operations.total == 0


@pytest.mark.parametrize("epochs", [2, 4])
def test_an_evaluation_in_inference_mode_between_epochs(runtime: Runtime, epochs: int) -> None:
    """torch puts back at its end what it found at its beginning: a mode that was left inside of it would be called."""
    model, loader = net(), DataLoader(TensorDataset(X), 1)

    @torch.inference_mode()
    def validate() -> None:
        for (x,) in loader:
            model(x)

    for _ in range(epochs):
        train(model, 3)
        validate()
        torch.zeros(1)  # needs no mode
    train(model, 6)
    assert _get_current_dispatch_mode() is None
    assert runtime.operations.total % LINEAR == 0


def test_compiled_code_is_not_compiled_anew(runtime: Runtime) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled.append(1)
        forward: Callable[..., Any] = graph.forward
        return forward

    model: Any = torch.compile(nn.Linear(8, 4), backend=backend)
    train(model, 6)
    torch._dynamo.reset()
    assert compiled == [1]
    assert runtime.operations.total == 0


STRATEGIES = ["ddp", "fsdp", "zero1", "pipeline", "ddp2", "dp"]


def _weights(rank: int, name: str, counted: bool) -> tuple[list[torch.Tensor], float]:
    devices = ("cpu", "cpu") if name == "dp" else ()
    info = rank_info(rank, 1 if name == "dp" else 2, devices=devices)
    runtime = Runtime(info, registry.make_strategy(name, {}, {}), lambda step, values: None)
    if not counted:
        runtime.operations.begin = lambda: None  # type: ignore[method-assign]
    runtime.install()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    runtime.begin(
        RunSpec(pool=PoolSpec(devices=("cpu", "cpu")), strategy=name), {"model": model, "optimizer": optimizer}
    )
    torch.manual_seed(rank)
    for _ in range(6):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    total = runtime.operations.total
    runtime.end(True)
    runtime.uninstall()
    return [p.detach().clone() for p in model.parameters()], total


def _both(rank: int, name: str) -> tuple[bool, float]:
    with_it, total = _weights(rank, name, True)
    without, nothing = _weights(rank, name, False)
    assert nothing == 0
    return all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True)), total


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_weights_to_the_last_bit(name: str) -> None:
    found = run_on_ranks(_both, name)
    assert [same for same, _ in found] == [True, True]
    totals = [total for _, total in found]
    if name == "dp":
        assert totals == [0, 0], "threads do not see what is around the loop's"
    elif name in ("pipeline", "ddp2"):
        assert sum(totals) == pytest.approx(6 * LINEAR), "each its own stage, or half of each batch"
    else:
        assert totals == [6 * LINEAR, 6 * LINEAR]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", 0),
        ("NVIDIA A10", "fp32", 31.2e12),
        ("NVIDIA A10G", "fp32", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32", 0),
        ("NVIDIA H100 80GB HBM3", "", 0),
    ],
)
def test_what_a_card_can_do_at_most(name: str, kind: str, expected: float) -> None:
    assert peak(name, kind) == expected
