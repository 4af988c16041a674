"""What gradients are averaged in, and when: GradientAverage on two ranks, or on one that is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.base.errors import NotSupported
from nbtrain.compat.tensors import flatten
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.gradient_buckets import AllReduce
from tests.support.ranks import run_on_ranks

DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _averaged(rank: int, comm_dtype: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], Any]:
    """(this rank's own gradients, what has become of them): two buckets, a parameter that one rank alone uses."""
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(40, 30), nn.Linear(30, 5), nn.Linear(30, 5)]).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0).add_(torch.linspace(-1, 1, p.numel(), dtype=dtype).view_as(p))
    batch = torch.randn(8, 40).to(dtype)

    def backward() -> list[torch.Tensor]:
        hidden = model[0](batch).tanh()
        out = model[1](hidden) + model[2](hidden) if rank == 0 else model[1](hidden)
        out.float().square().mean().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
        return found

    own = backward()
    for p in model.parameters():
        p.grad = None
    sync = GradientAverage(model.parameters(), bucket_mb=0.002, all_reduce=AllReduce(comm_dtype))
    assert len(sync.buckets) > 1
    try:
        return own, backward()
    finally:
        sync.close()


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
def test_gradients_are_rounded_on_their_way_and_stay_what_they_are(comm_dtype: str) -> None:
    (own, found), (other, same) = run_on_ranks(_averaged, comm_dtype, torch.float32)
    for a, b, mean, again in zip(own, other, found, same, strict=True):
        assert mean.dtype is torch.float32
        assert torch.equal(mean, again), "the same on both ranks"
        assert torch.equal(mean.to(DTYPES[comm_dtype]).float(), mean), "it came in 16 bits"
        digits = 0.01 * float((a.abs() + b.abs()).max())
        torch.testing.assert_close(mean, (a + b) / 2, rtol=0, atol=digits)
    assert not torch.equal(found[0], (own[0] + other[0]) / 2)


def test_gradients_in_halves_can_be_reduced_in_fp32() -> None:
    (own, found), (other, _) = run_on_ranks(_averaged, "fp32", torch.bfloat16)
    for a, b, mean in zip(own, other, found, strict=True):
        assert mean.dtype is torch.bfloat16
        assert torch.equal(mean, ((a.float() / 2) + (b.float() / 2)).bfloat16())


def _large(rank: int) -> list[float]:
    p = nn.Parameter(torch.ones(3))
    sync = GradientAverage([p], all_reduce=AllReduce("fp16"))
    (p.sum() * 60_000).backward()
    sync.close()
    assert p.grad is not None
    return p.grad.tolist()


def test_what_is_sent_in_fp16_is_divided_before_the_sum() -> None:
    """Which is 120,000: fp16 ends at 65,504."""
    assert run_on_ranks(_large) == [[60_000.0] * 3] * 2


class Alone(AllReduce):
    def average(self, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        sent = flatten(list(tensors))
        return lambda: sent


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_that_comes_again_once_it_was_sent_is_refused(again: bool) -> None:
    """A reentrant checkpoint is a backward of its own, inside of the one whose gradients have been sent."""
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    sync = GradientAverage([a.weight, b.weight], bucket_mb=1e-6, all_reduce=Alone())
    h = checkpoint(a, torch.ones(1, 2, requires_grad=True), use_reentrant=True)
    out = b(checkpoint(b, h, use_reentrant=True) if again else h)
    try:
        with pytest.raises(NotSupported, match="use_reentrant=False") if again else nullcontext():
            out.sum().backward()
    finally:
        sync.reset()
        sync.close()
