"""What a rank holds under `pipeline`: its stage, and what all micro-batches keep there.

All forwards come first, then all backwards: every micro-batch's activations wait at a time, those of the stage's own
units, and gradients are complete when the first of them has gone back. What the model returns, and what the loss makes
of it, is whole on every rank.

Units of a profile stand for the parts that a model is cut into, so parts without weights go with those around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.kit.per_parameter_optimizers import known_by_name
from nbtrain.strategies.kit.profile_arithmetic import moments, output, ring, step_bytes
from nbtrain.strategies.memory_estimate import Estimate, HasWeights, Profile, Weight, World
from nbtrain.strategies.pipeline.cut_stages import cut_evenly

LOSS = 3
"""times what the model returns: itself, what the loss makes of it, and the gradient of that"""


@dataclass(frozen=True)
class StageBytes(HasWeights):
    """What one stage has, in bytes."""

    weights: list[Weight]
    added_up: float
    """sent of gradients of shared ones"""
    activations: int
    """of all micro-batches"""
    arrives: int
    """from the stage before"""
    leaves: int
    """to the next"""
    passing: int
    """what the backward makes of all samples at once, for a moment"""


def estimate(options: Any, profile: Profile, world: World) -> Estimate:
    """`options`: those of Pipeline."""
    if world.ranks == 1:
        return profile_arithmetic.estimate(profile, world)
    stages = [_of_stage(options, profile, world, stage) for stage in _stages(options, profile, world)]
    heaviest = max(stages, key=lambda stage: stage.kept)
    most = {name: max(getattr(stage, name) for stage in stages) for name in ("activations", "buffers", "peak", "sent")}
    return replace(heaviest, **most)


# -- stages ---------------------------------------------------------------------------------------


def _owned(profile: Profile, weight: Weight) -> bool:
    """By one stage. What is left to the model itself is on every rank."""
    return 0 <= weight.unit < len(profile.units) and bool(profile.units[weight.unit].path)


def _stages(options: Any, profile: Profile, world: World) -> list[StageBytes]:
    weights = [weight for weight in profile.weights if _owned(profile, weight)]
    shared = [weight for weight in profile.weights if not _owned(profile, weight)]
    order = sorted({weight.unit for weight in weights})
    costs = [sum(weight.numel for weight in weights if weight.unit == unit) for unit in order]
    given = [int(count) for count in options.balance.split(",") if count.isdigit()]
    fits = len(given) == world.ranks and sum(given) == len(order)  # units of the profile are the parts
    counts = given if fits else cut_evenly(costs, min(world.ranks, len(order))) if order else []
    known = sum(profile.units[unit].activations for unit in order)
    rest = sum(unit.activations for unit in profile.units) - known  # of parts without weights, wherever they are
    passing = dict(_passing(profile, order))
    stages = []
    for start, end in pairwise([0, *accumulate(counts)]):
        mine = order[start:end]
        own = sum(profile.units[unit].activations for unit in mine)
        stages.append(
            StageBytes(
                [*(weight for weight in weights if weight.unit in mine), *shared],
                2 * ring(sum(weight.bytes for weight in shared if weight.trains), world.ranks),
                own + rest * own // max(1, known),
                profile.units[order[start - 1]].output if start else 0,
                profile.units[mine[-1]].output if end < len(order) else 0,
                max(passing.get(unit, 0) for unit in mine),
            )
        )
    return stages


def _passing(profile: Profile, order: list[int]) -> Iterator[tuple[int, int]]:
    """For each unit, what its backward needs besides the activations that wait."""
    waiting = sum(unit.activations for unit in profile.units)
    came = 0
    for unit in reversed(order):
        own = sum(weight.bytes for weight in profile.weights if weight.unit == unit and weight.trains)
        bytes_there = [m.activations for m in moments(profile) if came <= m.gradients <= came + own]
        yield unit, max(0, max(bytes_there, default=0) - waiting)
        came += own
        waiting -= profile.units[unit].activations


# -- one of them ----------------------------------------------------------------------------------


def _of_stage(options: Any, profile: Profile, world: World, stage: StageBytes) -> Estimate:
    parts = microbatches(options, profile.samples, world.ranks)
    gradients, returned = stage.gradients, output(profile)
    buffers = profile.buffers * stage.parameters // max(1, profile.parameters)
    state = stage.state if known_by_name(profile.optimizer) else profile.state
    fixed = stage.parameters + buffers + state
    before = gradients if world.accumulate > 1 else 0
    # What has arrived waits with the stage's own activations, as the first part's input.
    waiting = stage.activations + stage.arrives
    once = stage.passing // parts + returned
    step = profile.step * stage.largest // max(1, profile.largest)  # in main memory one weight is stepped at a time
    if world.kind != "cpu":
        step = step_bytes(profile, world, gradients / max(1, profile.gradients))
    peak = max(
        before + waiting + LOSS * returned,
        before + waiting + once,
        gradients + waiting * (parts - 1) // parts + once + stage.largest,  # from the second micro-batch on, added
        gradients + step,
    )
    returns = returned if not stage.leaves else 0
    return Estimate(
        parameters=stage.parameters + buffers,
        gradients=gradients,
        optimizer=state,
        activations=waiting + LOSS * returned,
        buffers=stage.largest + before,
        kept=fixed + gradients,
        peak=fixed + peak,
        sent=math.ceil((stage.leaves + stage.arrives + returns + stage.added_up) * world.accumulate),
    )


def microbatches(options: Any, samples: int, ranks: int) -> int:
    """As a batch is cut (`micro_batches.BatchCut`)."""
    return max(1, min(options.microbatches or max(1, min(4 * ranks, samples // 2)), samples))
