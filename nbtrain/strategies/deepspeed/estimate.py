"""What a rank holds under `deepspeed`, and what it sends: found by a walk through one step.

Stages 1 and 2: weights are whole on every rank, and each steps its part of them. A bucket is filled with gradients as
they come (stage 1: when the step is taken), and added up in a copy. What falls into the rank's part is copied to a
place of its own, from which the step makes a flat tensor of the part. Where the optimizer is offloaded it goes to the
host instead, where it stays.

Stage 3: every rank has a part of each weight, and weights are gathered for layers that need them. DeepSpeed gathers
ahead, a bucketful at once: in a flat tensor, out of which they are copied, and which stays until the last of them has
been used. Weights are let go of when they are not needed soon, which in models of less than half a milliard means:
after their backward. Small ones are never let go of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.kit.profile_arithmetic import moments, ring, trainable
from nbtrain.strategies.memory_estimate import Estimate, Profile, Weight, World

HALF, FULL, DOUBLE = 2, 4, 8
"""Bytes of a number. What the optimizer steps is a copy in full precision; norms are taken in double."""
ADAM = ("Adam", "AdamW")
STAGE_3_DEFAULTS = {
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's own, in numbers"""

ON_DISK = "what is kept on nvme is not counted, nor are the buffers through which it comes and goes"
CUT = "what partition_activations and cpu_checkpointing save of activations is not counted"


def estimate(options: Any, profile: Profile, world: World) -> Estimate:
    """`options`: those of DeepSpeed."""
    settings, precision = config.build(options, world.precision)
    if world.ranks == 1 and world.devices == 1:
        return profile_arithmetic.estimate(profile, world)
    known = Quantities(settings, precision, profile, world)
    walk = _stage_3(known) if known.stage == 3 else _stages_1_2(known)
    activations = max(found for found, _ in known.course)
    at_most = max(walk.moments)
    return Estimate(
        parameters=walk.parameters + profile.buffers,
        gradients=walk.gradients + walk.coming,
        optimizer=walk.optimizer,
        activations=activations,
        buffers=walk.buffers + max(at_most - activations - walk.coming, 0),
        kept=walk.fixed + profile.buffers,
        peak=walk.fixed + profile.buffers + at_most,
        sent=math.ceil(walk.sent),
        host=walk.host,
        notes=tuple(_notes(settings)),
    )


def _notes(settings: config.Settings) -> Iterator[str]:
    if "nvme" in (config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")):
        yield ON_DISK
    section = settings.get("activation_checkpointing") or {}
    if section.get("partition_activations") or section.get("cpu_checkpointing"):
        yield CUT


@dataclass(slots=True)
class StepBytes:
    """What a walk through a step has found: bytes of the rank that has the most."""

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    """that have a place of their own all the time"""
    buffers: int = 0
    """that stay, too"""
    host: int = 0
    """all that stays in main memory, where that is not where the model computes"""
    coming: int = 0
    """gradients, at the most, that come and go"""
    moments: list[int] = field(default_factory=list)
    """what is there besides, for a moment: activations, gradients, buckets"""
    sent: float = 0

    @property
    def fixed(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.buffers


class Quantities:
    """What both walks need to know of a profile and a config, in bytes."""

    def __init__(self, settings: config.Settings, precision: str, profile: Profile, world: World) -> None:
        self.profile, self.world = profile, world
        self.zero: dict[str, Any] = settings["zero_optimization"]
        self.stage: int = self.zero["stage"]
        self.ranks = world.ranks
        self.low = precision in ("bf16-true", "16-true")
        self.gloo = world.kind == "cpu"
        self.optimizer_at = config.offload(settings, "offload_optimizer")
        self.parameters_at = config.offload(settings, "offload_param")
        self.trained = trainable(profile)
        self.width = max((self.bytes(one) // max(1, one.numel) for one in self.trained), default=FULL)
        """bytes of a number, as the model computes with it, and of its gradient"""
        self.numel = sum(one.numel for one in self.trained)
        self.stepped = -(-self.numel // self.ranks) * FULL
        """bytes of what a rank steps"""
        self.share = -(-self.numel // self.ranks) * self.width
        """the same, as the model computes with it"""
        self.whole = sum(map(self.bytes, profile.weights))
        self.gradients = self.numel * self.width
        self.largest = max(map(self.bytes, self.trained), default=0)
        self.state = int(sum(one.state * one.numel * FULL / max(1, one.bytes) for one in self.trained)) // self.ranks
        # What is not trained is kept in full besides, for it comes home as it was.
        self.frozen = sum(FULL * one.numel for one in profile.weights if not one.trains) if self.low else 0
        scale = self.gradients / max(1, profile.gradients)
        self.course = [(m.activations, int(m.gradients * scale)) for m in moments(profile)]
        """activations, and gradients that have come"""

    def bytes(self, weight: Weight) -> int:
        return HALF * weight.numel if self.low else weight.bytes

    def here(self, offloaded: str) -> bool:
        """What is kept there is kept where the model computes."""
        return offloaded == "none" or (offloaded == "cpu" and self.world.kind == "cpu")

    def left(self, arrived: int) -> int:
        """Activations that are left when so much of the gradients has come."""
        return next((activations for activations, came in self.course if came >= arrived), self.course[-1][0])

    def passing(self) -> float:
        """What the optimizer's step takes on the way, times what it steps: that is one flat tensor."""
        adam = self.profile.optimizer in ADAM
        if adam and (self.optimizer_at != "none" or self.world.kind != "cpu"):
            return 0.0  # one kernel does it
        if self.world.kind == "cpu" or self.optimizer_at != "none":
            return self.profile.step / max(1, self.profile.largest)
        return self.profile.step_together / max(1, self.profile.gradients)

    def fills(self, weights: Iterable[Weight], capacity: int) -> Iterator[int]:
        """What a bucket of so many bytes has in it each time that it is sent."""
        filled = 0
        for size in map(self.bytes, weights):
            if filled and filled + size > capacity:
                yield filled
                filled = 0
            filled += size
        if filled:
            yield filled

    def touched(self) -> int:
        """Bytes of the weights that lie in one rank's part of them all, at the most: those at its ends as a whole."""
        part = -(-self.numel // self.ranks)
        ends = [*accumulate(one.numel for one in self.trained)]
        found = [0] * self.ranks
        for weight, end in zip(self.trained, ends, strict=True):
            if weight.numel:
                first, last = (end - weight.numel) // part, (end - 1) // part
                for rank in range(first, last + 1):
                    found[rank] += self.bytes(weight)
        return max(found)

    def capacity(self) -> int:
        """Bytes of the bucket of gradients, which under stage 3 is not larger than all of them."""
        size = int(self.zero["reduce_bucket_size"])
        return (min(size, self.numel) if self.stage == 3 else size) * self.width

    def setting(self, name: str) -> int:
        """A setting of stage 3."""
        found: Any = self.zero.get(name)
        return int(STAGE_3_DEFAULTS[name] if found is None else found)


# --- stages 1 and 2 ------------------------------------------------------------------------------


def _stages_1_2(q: Quantities) -> StepBytes:
    walk = StepBytes(parameters=q.whole, buffers=q.frozen)
    mine = q.touched()
    offloaded = q.optimizer_at != "none"
    waiting = q.state + q.stepped  # the optimizer's state, and the copy that it steps
    if offloaded:
        # Gradients of the step, its result on the way back, gradients of each weight, and room for one of them.
        waiting += q.stepped + q.share + mine + q.largest
        walk.buffers += q.largest
    if q.here(q.optimizer_at):
        walk.optimizer = q.state
        walk.gradients = q.stepped if offloaded else 0
        walk.buffers += waiting - walk.optimizer - walk.gradients
    else:
        walk.host = waiting
    walk.coming = q.gradients if q.stage == 1 else 0 if offloaded else mine
    owned = 0 if offloaded else mine
    walk.moments += _backward_stage_2(q, owned) if q.stage == 2 else _backward_stage_1(q, owned)
    walk.moments += _step_stages_1_2(q, owned)
    walk.sent = 2 * ring(q.gradients, q.ranks) * (q.world.accumulate if q.stage == 2 else 1)
    walk.sent += ring(q.gradients, q.ranks)
    return walk


def _bucket(q: Quantities, filled: int) -> int:
    """Bytes of the bucket: main memory is only taken where it is written to."""
    contiguous = q.zero["contiguous_gradients"] or q.optimizer_at != "none"
    times = 2 if q.zero.get("overlap_comm") and contiguous else 1
    return times * (filled if q.world.kind == "cpu" or not contiguous else q.capacity())


def _backward_stage_2(q: Quantities, owned: int) -> Iterator[int]:
    """`owned`: gradients that the rank keeps."""
    capacity = q.capacity()
    held = owned if q.world.accumulate > 1 else 0  # of the batches before
    came = top = 0
    for filled in q.fills(reversed(q.trained), capacity):
        kept = held + min(came, owned)
        for activations, arrived in q.course:
            if came <= arrived <= came + filled:
                here = min(max(top, arrived - came), capacity)
                yield activations + _bucket(q, here) + kept + q.largest
        if filled <= capacity:
            top = max(top, filled)
        came += filled
        yield q.left(came) + _bucket(q, top) + filled + kept + (filled if filled > capacity else 0)
    yield q.course[-1][0] + held + owned


def _backward_stage_1(q: Quantities, owned: int) -> Iterator[int]:
    """As in one process, and then, in the step, bucket by bucket."""
    capacity = q.capacity()
    contiguous = _bucket(q, 0)
    again = q.world.accumulate > 1
    for activations, arrived in q.course:
        yield activations + contiguous + (q.gradients + q.largest if again else arrived)
    rest = q.course[-1][0]
    came = top = 0
    for filled in q.fills(q.trained, capacity):
        if filled <= capacity:
            top = max(top, filled)
            came += filled
        yield rest + q.gradients - came + _bucket(q, top) + filled + min(max(came - filled, 0), owned)


def _step_stages_1_2(q: Quantities, owned: int) -> Iterator[int]:
    rest = q.course[-1][0]
    if q.optimizer_at == "none":
        yield rest + owned + q.largest // q.width * DOUBLE
        yield rest + owned + q.share + (q.stepped if q.width < FULL else 0)
        yield rest + q.stepped + int(q.passing() * q.stepped)
    elif q.here(q.optimizer_at):
        yield rest + int(q.passing() * q.stepped)
    if q.gloo:  # which gathers weights into a copy
        yield rest + q.gradients


# --- stage 3 -------------------------------------------------------------------------------------


def _stage_3(q: Quantities) -> StepBytes:
    persistent = q.zero["stage3_param_persistence_threshold"]
    walk = StepBytes(buffers=q.frozen // q.ranks)
    walk.buffers += sum(q.bytes(one) for one in q.profile.weights if one.numel <= persistent)
    contiguous = q.zero["contiguous_gradients"]
    walk.buffers += q.capacity() if contiguous else 0
    part = sum(-(-one.numel // q.ranks) * (q.bytes(one) // max(1, one.numel)) for one in q.profile.weights)
    if q.here(q.parameters_at):
        walk.parameters = part
    elif q.parameters_at == "cpu":
        walk.host += part
    # The copy that is stepped, and gradients, which have their place from the beginning; if the step is taken in the
    # host's memory, it has a place of its own for them besides.
    copies = q.stepped + (q.stepped if q.optimizer_at != "none" else 0)
    if q.here(q.optimizer_at):
        walk.optimizer, walk.gradients = q.state, q.share
        walk.buffers += copies
    elif q.optimizer_at == "cpu":
        walk.host += q.state + q.share + copies
    else:  # nvme has the rest
        walk.host += q.share
    # What is used again within so many numbers is not let go of: on the way back that is, from the end, twice as
    # far as it was.
    most = min(q.setting("stage3_max_live_parameters"), q.setting("stage3_max_reuse_distance") // 2)
    live = min(q.whole, most * q.width)
    flat = min(q.whole, q.setting("stage3_prefetch_bucket_size") * q.width)
    again = live < q.whole  # weights are gathered for the backward, too

    def left(arrived: int) -> int:
        """Whole weights, when so much of the gradients has come."""
        rest = max(q.whole - arrived, 0)
        return min(live, rest) + (min(flat, rest) if again else 0)

    walk.moments.append(q.course[0][0] + live + flat)
    walk.moments += [activations + left(arrived) + q.largest for activations, arrived in q.course]
    came = 0
    for filled in q.fills(reversed(q.trained), q.capacity()):
        came += filled
        own = 0 if contiguous else filled
        walk.moments.append(q.left(came) + left(came) + own + filled * (1 + q.gloo))
    walk.moments += _step_stage_3(q)
    times = 2 if again else 1
    walk.sent = q.world.accumulate * (times * ring(q.whole, q.ranks) + ring(q.gradients, q.ranks))
    return walk


def _step_stage_3(q: Quantities) -> Iterator[int]:
    rest = q.course[-1][0]
    at_once = min(q.stepped, q.setting("sub_group_size") * FULL)
    if q.optimizer_at == "none":
        yield rest + at_once + (at_once * q.width // FULL if q.width < FULL else 0)
        yield rest + at_once + int(q.passing() * at_once)
    elif q.here(q.optimizer_at):
        yield rest + int(q.passing() * at_once)
    yield rest + q.share // q.width  # of each gradient, whether it is infinite
