"""What a rank holds under `pipeline`: its stage, and what all micro-batches keep there.

All forwards come first, then all backwards: every micro-batch's activations wait at a time, those of the stage's own
units, and gradients are complete when the first of them has gone back. What the model returns, and what the loss makes
of it, is whole on every rank. With `--loss` a stage keeps no more micro-batches than there are stages from it on.

Units of a profile stand for the parts that a model is cut into, so parts without weights go with those around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.kit.profile_arithmetic import moments, output, ring, step_bytes
from nbtrain.strategies.memory_estimate import Estimate, HasWeights, Profile, Weight, World
from nbtrain.strategies.pipeline.cut_stages import cut_evenly

LOSS = 3
"""times what the model returns: itself, what the loss makes of it, and the gradient of that"""
OTHERWISE = "--balance {balance} is not looked at: stages are taken to be cut by parameters"


@dataclass(frozen=True)
class StageBytes(HasWeights):
    """What one stage has, in bytes."""

    weights: list[Weight]
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
    held = [weight for weight in profile.weights if _owned(profile, weight)]
    shared = [weight for weight in profile.weights if not _owned(profile, weight)]
    found = [
        _of_stage(options, profile, world, stage, shared, number)
        for number, stage in enumerate(_stages(options, profile, world, held, shared))
    ]
    heaviest = max(found, key=lambda one: one.kept)
    notes = () if _follows(options, profile, world) else (OTHERWISE.format(balance=options.balance),)
    return Estimate(
        parameters=heaviest.parameters,
        gradients=heaviest.gradients,
        optimizer=heaviest.optimizer,
        activations=max(one.activations for one in found),
        buffers=max(one.buffers for one in found),
        kept=heaviest.kept,
        peak=max(one.peak for one in found),
        sent=max(one.sent for one in found),
        notes=notes,
    )


# -- stages ---------------------------------------------------------------------------------------


def _owned(profile: Profile, weight: Weight) -> bool:
    """By one stage. What is left to the model itself is on every rank."""
    return 0 <= weight.unit < len(profile.units) and bool(profile.units[weight.unit].path)


def _follows(options: Any, profile: Profile, world: World) -> bool:
    given = options.balance[:1].isdigit()
    return options.balance == "auto" or (given and bool(_given(options.balance, profile, world)))


def _given(balance: str, profile: Profile, world: World) -> list[int]:
    """Parts in each stage, where the profile's units are these parts."""
    counts = [int(count) for count in balance.split(",")] if balance[:1].isdigit() else []
    units = {weight.unit for weight in profile.weights if _owned(profile, weight)}
    return counts if len(counts) == world.ranks and sum(counts) == len(units) else []


def _stages(options: Any, profile: Profile, world: World, held: list[Weight], shared: list[Weight]) -> list[StageBytes]:
    order = sorted({weight.unit for weight in held})
    costs = [sum(weight.numel for weight in held if weight.unit == unit) for unit in order]
    ranks = min(world.ranks, len(order))
    counts = _given(options.balance, profile, world) or (cut_evenly(costs, ranks) if order else [])
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    known = sum(profile.units[unit].activations for unit in order)
    rest = sum(unit.activations for unit in profile.units) - known  # of parts without weights, wherever they are
    passing = dict(_passing(profile, order))
    stages = []
    for start, end in pairwise(ends):
        mine = order[start:end]
        own = sum(profile.units[unit].activations for unit in mine)
        stages.append(
            StageBytes(
                [*(weight for weight in held if weight.unit in mine), *shared],
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
        found = [m.activations for m in moments(profile) if came <= m.gradients <= came + own]
        yield unit, max(0, max(found, default=0) - waiting)
        came += own
        waiting -= profile.units[unit].activations


# -- one of them ----------------------------------------------------------------------------------


def _of_stage(
    options: Any, profile: Profile, world: World, stage: StageBytes, shared: list[Weight], number: int
) -> Estimate:
    parts = microbatches(options, profile.samples, world.ranks)
    once = stage.passing // parts
    gradients, returned = stage.gradients, output(profile)
    buffers = profile.buffers * stage.parameters // max(1, profile.parameters)
    fixed = stage.parameters + buffers + stage.state
    before = gradients if world.accumulate > 1 else 0
    # What has arrived waits with the stage's own activations, as the first part's input.
    waiting = stage.activations + stage.arrives
    if options.loss is None:
        peaks = [before + waiting + LOSS * returned, before + waiting + once + returned]
        # From the second micro-batch on gradients are added to those that are there.
        peaks.append(gradients + _less_one(waiting, parts) + once + stage.largest + returned)
    else:
        at_a_time = min(parts, world.ranks - number)
        waiting = math.ceil(waiting * at_a_time / parts)
        last = LOSS * returned // parts if not stage.leaves else 0
        peaks = [before + gradients + waiting + once + stage.largest + last]
        peaks.append(before + 2 * gradients)  # those of the stages, and what they count in the loop's backward
    peaks.append(gradients + _step(profile, world, stage))
    added_up = 2 * ring(sum(weight.bytes for weight in shared if weight.trains), world.ranks)
    returns = returned if not stage.leaves and options.loss is None else 0
    sent = (stage.leaves + stage.arrives + returns + added_up) * world.accumulate
    return Estimate(
        parameters=stage.parameters + buffers,
        gradients=gradients,
        optimizer=stage.state,
        activations=waiting + (LOSS * returned if options.loss is None else 0),
        buffers=stage.largest + before,
        kept=fixed + gradients,
        peak=fixed + max(peaks),
        sent=math.ceil(sent),
    )


def microbatches(options: Any, samples: int, ranks: int) -> int:
    """As a batch is cut (`micro_batches.BatchCut`)."""
    return max(1, min(options.microbatches or max(1, min(4 * ranks, samples // 2)), samples))


def _less_one(waiting: int, parts: int) -> int:
    return waiting * (parts - 1) // parts


def _step(profile: Profile, world: World, stage: StageBytes) -> int:
    """In main memory one weight is stepped at a time."""
    if world.kind == "cpu":
        return profile.step * stage.largest // max(1, profile.largest)
    return step_bytes(profile, world, stage.gradients / max(1, profile.gradients))
