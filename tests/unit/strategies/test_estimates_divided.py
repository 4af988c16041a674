"""What fsdp, deepspeed and pipeline say that a rank will hold, where that can be counted by hand.

Beside what is measured (test_estimates.py): what options change, and what cards would hold, which are not here.
"""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.strategies.memory_estimate import Estimate, Moment, Profile, Unit, Weight, World

UNITS, NUMEL = 8, 1_000_000
OWN = 4 * NUMEL
"""bytes of a unit's weight"""
WHOLE = UNITS * OWN
KEPT, RETURNED = 600_000, 200_000
"""bytes of activations that a unit keeps, and of what it returns"""
GPUS = World(ranks=4, kind="cuda")


def profile(frozen: int = 0, width: int = 4, **more: Any) -> Profile:
    """Of equal units, the first of which are frozen. The optimizer keeps two numbers of each, and needs one more."""
    weights = tuple(
        Weight(
            name=f"{i}.weight", numel=NUMEL, bytes=width * NUMEL, trains=i >= frozen,
            state=2 * width * NUMEL * (i >= frozen), unit=i,
        )
        for i in range(UNITS)
    )  # fmt: skip
    units = [Unit(path=str(i), kind="Block", activations=KEPT, output=RETURNED) for i in range(UNITS)]
    moments = [Moment(KEPT * (UNITS - i), width * NUMEL * i) for i in range(UNITS - frozen + 1)]
    given: dict[str, Any] = {
        "model": "Model",
        "weights": weights,
        "units": (*units, Unit(path="", kind="Model", activations=0, output=RETURNED)),
        "buffers": 0,
        "moments": tuple(moments),
        "step": width * NUMEL,
        "step_together": width * NUMEL * (UNITS - frozen),
        "optimizer": "SGD",
        "samples": 32,
        "precision": "32",
    }
    return Profile(**{**given, **more})


def estimate(strategy: str, world: World = GPUS, of: Profile | None = None, **options: Any) -> Estimate:
    cls = registry.strategy(strategy).load()
    found = cls(cls.Options(**options)).estimate(of or profile(), world)
    assert found is not None
    return found


def share(among: int = 4) -> tuple[int, int, int]:
    return WHOLE // among, WHOLE // among, 2 * WHOLE // among


def parts(found: Estimate) -> tuple[int, int, int]:
    return found.parameters, found.gradients, found.optimizer


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "pipeline"])
def test_one_rank_alone_has_all_of_it(strategy: str) -> None:
    found = estimate(strategy, World(ranks=1))
    assert parts(found) == (WHOLE, WHOLE, 2 * WHOLE)
    assert found.sent == 0


# -- fsdp -----------------------------------------------------------------------------------------


def test_fsdp_divides_everything_and_gathers_three_times() -> None:
    found = estimate("fsdp")
    assert parts(found) == share()
    assert found.kept == sum(share())
    assert found.sent == 3 * WHOLE * 3 // 4
    assert found.host == 0


def test_fsdp_hybrid_divides_within_a_replica() -> None:
    found = estimate("fsdp", sharding="HYBRID_SHARD", replicas=2)
    assert parts(found) == share(2)
    assert found.sent == 3 * WHOLE // 2 + WHOLE // 2  # and the halves' gradients are averaged by two
    with pytest.raises(UsageError, match="--replicas 3"):
        estimate("fsdp", sharding="HYBRID_SHARD", replicas=3)


def test_fsdp_offload_leaves_a_card_what_is_gathered() -> None:
    found, full = estimate("fsdp", cpu_offload=True), estimate("fsdp")
    assert parts(found) == (0, 0, 0)
    assert found.host >= sum(share())
    assert found.peak < full.peak
    there = World(ranks=4)
    assert estimate("fsdp", there, cpu_offload=True) == estimate("fsdp", there)


# -- deepspeed ------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"reduce_bucket_size": NUMEL, "allgather_bucket_size": NUMEL}
COPY = WHOLE // 4
"""what is stepped"""
SOON: dict[str, Any] = {
    "stage": 3,
    "config": {"zero_optimization": {"stage3_max_live_parameters": NUMEL, "stage3_prefetch_bucket_size": NUMEL}},
}
"""weights are let go of soon"""


def test_deepspeed_divides_what_its_stage_says() -> None:
    one, two, three = (estimate("deepspeed", stage=stage, **SMALL) for stage in (1, 2, 3))
    assert [one.parameters, two.parameters, three.parameters] == [WHOLE, WHOLE, WHOLE // 4]
    assert [one.gradients, two.gradients, three.gradients] == [WHOLE, WHOLE // 4, WHOLE // 4]
    assert [one.optimizer, two.optimizer, three.optimizer] == 3 * [2 * WHOLE // 4]
    assert one.kept == two.kept == WHOLE + 2 * WHOLE // 4 + COPY  # gradients have gone with the step
    assert three.kept == sum(share()) + COPY + OWN  # and the bucket stays
    assert one.peak > two.peak > estimate("deepspeed", **SOON, **SMALL).peak
    # A model that is not larger than what is gathered ahead is gathered as a whole, and there twice for that time.
    assert three.peak >= three.kept + 2 * WHOLE


def test_deepspeed_offload_moves_to_the_host() -> None:
    for stage in (2, 3):
        found = estimate("deepspeed", stage=stage, offload_optimizer="cpu", **SMALL)
        full = estimate("deepspeed", stage=stage, **SMALL)
        assert found.optimizer == 0
        assert found.host >= 2 * WHOLE // 4 + 2 * COPY
        assert found.peak < full.peak
    both = estimate("deepspeed", stage=3, offload_optimizer="cpu", offload_parameters="cpu", **SMALL)
    assert parts(both) == (0, 0, 0)
    assert both.peak < found.peak


# -- pipeline -------------------------------------------------------------------------------------


def test_a_stage_has_its_units() -> None:
    found = estimate("pipeline")
    assert parts(found) == share()
    assert found.kept == sum(share())
    assert 2 * KEPT <= found.activations <= 2 * KEPT + 4 * RETURNED
    assert found.sent == 2 * RETURNED  # there and back; the last one's go to all


def test_micro_batches_have_gradients_and_activations_at_a_time() -> None:
    units = [Unit(path=str(i), kind="Block", activations=2 * OWN, output=0) for i in range(UNITS)]
    moments = [Moment(2 * OWN * (UNITS - i), OWN * i) for i in range(UNITS + 1)]
    large = profile(units=tuple(units), moments=tuple(moments))
    whole, many = (estimate("pipeline", of=large, microbatches=count) for count in (1, 16))
    assert whole.kept == many.kept
    assert whole.peak == whole.kept + 2 * OWN  # when the loss begins, and there are no gradients
    assert many.peak >= many.kept + 3 * OWN
