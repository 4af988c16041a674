"""The arithmetic of estimates, on profiles made of round numbers; and what it says of buckets and shares is what the
strategies do, on real ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.machine import registry
from nbtrain.strategies.base import Component
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.gradient_buckets import AllReduce, in_buckets
from nbtrain.strategies.kit.profile_arithmetic import trainable, width
from nbtrain.strategies.memory_estimate import Estimate, Profile, Unit, Weight, World
from nbtrain.strategies.sharded import PreparedSharded, _owners, divisible
from nbtrain.strategies.zero1 import PreparedZero1, dealt_out, in_parcels
from tests.support.profiles import MB, profile
from tests.support.ranks import run_on_ranks


def said(strategy: str, of: Profile, world: World, **options: Any) -> Estimate:
    cls = registry.strategy(strategy).load()
    found: Estimate = cls(cls.Options(**options)).estimate(of, world)
    return found


def test_one_process_has_everything_and_its_peak_is_where_there_is_most() -> None:
    early = said("single", profile(100 * MB, 90 * MB, 50 * MB, 20 * MB, 1 * MB), World(ranks=1))
    assert (early.parameters, early.gradients, early.optimizer) == (16 * MB, 16 * MB, 32 * MB)
    assert early.kept == 64 * MB
    assert early.sent == early.buffers == 0
    assert early.peak == (48 + 100) * MB  # gradients come when activations have gone
    late = said("single", profile(20 * MB, 10 * MB, 5 * MB, 1 * MB, 1 * MB), World(ranks=1))
    assert late.peak == (64 + 16 + 1) * MB  # the step: twice the largest weight, and what is left of activations
    gpu = said("single", profile(20 * MB, 10 * MB, 5 * MB, 1 * MB, 0), World(ranks=1, kind="cuda"))
    assert gpu.peak == (64 + 16) * MB


def test_under_ddp_gradients_are_there_twice_when_the_backward_ends() -> None:
    of = profile(20 * MB, 10 * MB, 5 * MB, 1 * MB, 0)
    found = said("ddp", of, World(ranks=2))
    assert found.peak == (48 + 32) * MB
    assert found.buffers == 16 * MB
    assert found.kept == 64 * MB
    assert found.sent == 16 * MB  # a ring of two: each sends all of it once
    assert said("ddp", of, World(ranks=8)).sent == 28 * MB
    alone = said("ddp", of, World(ranks=1))
    assert alone.sent == alone.buffers == 0


def test_the_first_bucket_is_small_so_that_it_travels_while_others_fill() -> None:
    weights = [5, 4, 3, 0.5, 0.7, 0.1]
    assert in_buckets(weights, 25 * MB, lambda weight: int(weight * MB), lambda _: 0) == [[0.1, 0.7, 0.5], [3, 4, 5]]
    assert in_buckets(weights, MB, lambda weight: int(weight * MB), lambda _: 0)[:2] == [[0.1, 0.7], [0.5]]


def test_zero1_divides_the_state_and_sends_parameters_back() -> None:
    of = profile(0, 0, 0, 0, 0)
    found = said("zero1", of, World(ranks=2))
    assert found.optimizer == 16 * MB
    assert found.kept == 48 * MB
    assert found.sent == (16 + 8) * MB
    fine = said("zero1", of, World(ranks=2), bucket_mb=1)
    assert fine.peak == (16 + 16 + 16) * MB + max(16 * MB, 2 * 8 * MB)  # all four parcels are on their way at once
    gpu = said("zero1", of, World(ranks=2, kind="cuda"), bucket_mb=1)
    assert gpu.peak == fine.peak
    for name in ("LBFGS", "Lamb"):  # stepped whole, as any that is not torch's
        assert said("zero1", profile(0, optimizer=name), World(ranks=2)).optimizer == 32 * MB


def test_sharded_divides_gradients_too() -> None:
    found = said("sharded", profile(0, 0, 0, 0, 0), World(ranks=2))
    assert (found.gradients, found.optimizer, found.kept) == (8 * MB, 16 * MB, 40 * MB)
    assert found.buffers == 8 * MB  # the other rank's, until they have arrived there
    whole = said("sharded", profile(0, optimizer="Lamb"), World(ranks=2))
    assert (whole.gradients, whole.optimizer) == (16 * MB, 32 * MB)
    assert found.sent == 16 * MB


def test_parts_of_a_batch_divide_what_the_model_makes_of_it() -> None:
    units = (Unit(path="", kind="Net", activations=60 * MB, output=2 * MB),)
    of = profile(100 * MB, 90 * MB, 50 * MB, 6 * MB, 6 * MB, units=units)
    whole = 6 * MB  # three times the output: itself, the loss's own, its gradient
    found = said("ddp2", of, World(ranks=4))
    assert found.activations == whole + (100 * MB - whole) // 4
    assert found.sent == 24 * MB + 3 * MB // 2
    nodes = said("ddp2", of, World(ranks=4, nodes=4))
    assert nodes.activations == 100 * MB
    assert nodes.sent == 24 * MB
    gpu = said("dp", of, World(ranks=1, devices=4, kind="cuda"))
    assert gpu.activations == found.activations
    assert gpu.sent == 3 * 16 * MB
    assert gpu.buffers == 16 * MB  # another device's gradients arrive all at once
    threads = said("dp", of, World(ranks=1, devices=4))
    assert threads.activations == whole + 60 * MB + (94 - 60) * MB // 4  # what waits is all here


# -- what the strategies do -----------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    widths = (300, 7, 500, 40, 40, 200)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    layers[2].weight.requires_grad_(False)
    layers[3].to(torch.float64)
    return nn.Sequential(*layers)


def described(model: nn.Module) -> Profile:
    weights = tuple(
        Weight(name=n, numel=p.numel(), bytes=p.nbytes, trains=p.requires_grad, state=0, unit=0)
        for n, p in model.named_parameters()
    )
    return Profile(
        model="", weights=weights, units=(), buffers=0, moments=(), step=0, optimizer="", samples=1, precision="32"
    )


@pytest.mark.parametrize("megabytes", [0.01, 0.05, 25])
def test_buckets_are_those_that_gradients_travel_in(megabytes: float) -> None:
    model = net()
    names = {id(p): name for name, p in model.named_parameters()}
    sync = GradientAverage(model.parameters(), megabytes)
    try:
        made = [[names[id(p)] for p in bucket.parameters] for bucket in sync.buckets]
    finally:
        sync.close()
    weights = trainable(described(model))
    dealt = in_buckets(weights, int(megabytes * 2**20), lambda weight: weight.bytes, width)
    assert [[weight.name for weight in bucket] for bucket in dealt] == made


def parcels_of_zero1(rank: int) -> list[int]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    shares = PreparedZero1(Component({"model": model}, {"optimizer": optimizer}), 0.05, AllReduce())
    try:
        return [sum(p.nbytes for p in parameters) for _, parameters in shares.parcels(optimizer)]
    finally:
        shares.close(False)


def test_parcels_are_those_that_zero1_sends() -> None:
    weights = trainable(described(net()))
    owners = dealt_out([weight.numel for weight in weights], 2)
    parcels = in_parcels(weights, owners, int(0.05 * 2**20), lambda weight: weight.bytes, width)
    sizes = [sum(weight.bytes for weight in parcel) for _, parcel in parcels]
    assert run_on_ranks(parcels_of_zero1) == [sizes] * 2


def owners_of_sharded(rank: int) -> list[int]:
    model = net().float()
    component = Component({"model": model}, {"optimizer": torch.optim.AdamW(model.parameters())})
    fair = PreparedSharded(component, divisible(component))
    try:
        return [fair.owners[id(p)] for p in model.parameters() if p.requires_grad]
    finally:
        fair.close(False)


def test_owners_are_those_that_fairscale_names() -> None:
    pytest.importorskip("fairscale")
    assert run_on_ranks(owners_of_sharded) == [_owners(trainable(described(net())), 2)] * 2
