"""What estimates of several strategies have in common: arithmetic on a `Profile`, in which nothing is allocated.

A rank holds the model, what the optimizer keeps, and besides, at each moment of the backward, the activations that are
left, the gradients that have come and what of them is travelling. Its peak is at one of these moments, or when the
optimizer steps. Gradients are taken to be let go of before the next forward, as `zero_grad` does after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from nbtrain.strategies.kit.gradient_average import DTYPES
from nbtrain.strategies.memory_estimate import Estimate, Moment, Profile, Weight, World

Width = Callable[[int], int]
"""bytes of a number of gradients → bytes of it on its way"""
Activations = Callable[[int], int]
"""bytes of activations in one process → what is here of them"""
Travelling = Callable[[int], int]
"""bytes of gradients that have come → bytes that are there of them a second time"""


def nothing(arrived: int) -> int:
    return 0


def as_is(activations: int) -> int:
    return activations


def estimate(
    profile: Profile,
    world: World,
    *,
    gradients: int | None = None,
    optimizer: int | None = None,
    travelling: Travelling = nothing,
    activations: Activations = as_is,
    step: int | None = None,
    after: int = 0,
    sent: float = 0,
    notes: Iterable[str] = (),
) -> Estimate:
    """The estimate for a rank that has the whole model. `gradients`: bytes that it has when the backward has ended,
    where that is not all. `activations`: bytes of them here, of so many in one process. `after`: bytes needed for a
    moment once the optimizer has stepped."""
    model = profile.parameters + profile.buffers
    kept = profile.gradients if gradients is None else gradients
    state = profile.state if optimizer is None else optimizer
    stepping = step_bytes(profile, world) if step is None else step
    course = moments(profile)
    again = world.accumulate > 1  # gradients of the batches before are there all the time
    fresh = largest(profile) if again else 0
    rest = activations(course[-1].activations)
    peaks = [
        activations(m.activations) + (profile.gradients + fresh if again else m.gradients) + travelling(m.gradients)
        for m in course
    ]
    peaks += [rest + kept + stepping, rest + kept + after]
    most = max(m.gradients + travelling(m.gradients) for m in course) + fresh
    return Estimate(
        parameters=model,
        gradients=kept,
        optimizer=state,
        activations=max(activations(m.activations) for m in course),
        buffers=max(most - kept, after, 0),
        kept=model + kept + state,
        peak=model + state + max(peaks),
        sent=math.ceil(sent),
        notes=tuple(notes),
    )


def moments(profile: Profile) -> Sequence[Moment]:
    """And the end of the backward, when all gradients are there."""
    last = profile.moments[-1].activations if profile.moments else 0
    return *profile.moments, Moment(last, profile.gradients)


def trainable(profile: Profile) -> list[Weight]:
    return [weight for weight in profile.weights if weight.trains]


def largest(profile: Profile) -> int:
    """Bytes of the largest gradient."""
    return max((weight.bytes for weight in trainable(profile)), default=0)


def step_bytes(profile: Profile, world: World, share: float = 1.0) -> int:
    """What a step takes for a moment. On a CPU it is of the largest weight; on GPUs torch's optimizers step all weights
    at once, so that it is of the share of them that a rank steps."""
    return profile.step if world.kind == "cpu" else math.ceil(profile.step_together * share)


def ring(bytes: float, ranks: int) -> float:
    """What one rank sends when each gets everybody's share: all-gather, reduce-scatter, broadcast in parts."""
    return bytes * (ranks - 1) / ranks


# -- gradients in buckets -------------------------------------------------------------------------


def in_buckets(weights: Iterable[Weight], capacity: int) -> list[list[Weight]]:
    """As `GradientAverage` deals them out, given in the order in which the model has them."""
    groups: list[list[Weight]] = []
    room = 0
    for weight in reversed([one for one in weights if one.trains]):
        last = groups[-1][0] if groups else None
        if last is None or room < weight.bytes or width(last) != width(weight):
            groups.append([])
            room = capacity
        groups[-1].append(weight)
        room -= weight.bytes
    return groups


def width(weight: Weight) -> int:
    """Bytes of one number."""
    return weight.bytes // max(1, weight.numel)


class Sent:
    """What travels of gradients that are averaged by all ranks, and is there besides until the backward has ended."""

    def __init__(self, profile: Profile, world: World, bucket_mb: float, travels: Width) -> None:
        self.buckets = in_buckets(profile.weights, int(bucket_mb * 2**20))
        self.own = [sum(weight.bytes for weight in bucket) for bucket in self.buckets]
        self.flat = [
            own // width(bucket[0]) * travels(width(bucket[0]))
            for own, bucket in zip(self.own, self.buckets, strict=True)
        ]
        self.cast = max((own for own, flat in zip(self.own, self.flat, strict=True) if own != flat), default=0)
        """of the largest bucket that is cast: on the way there and back it is there once more"""
        self.bytes = 2 * ring(sum(self.flat), world.ranks)

    def travelling(self, arrived: int) -> int:
        """A bucket is sent when it is full, in their order."""
        found = came = 0
        for own, flat in zip(self.own, self.flat, strict=True):
            came += own
            if came > arrived:
                break
            found += flat
        return found + (self.cast if found else 0)


def width_sent(dtype: str, world: World) -> Width:
    """What `AllReduce` sends of a number; gloo adds up halves as float32."""
    if dtype in DTYPES:
        return lambda _: DTYPES[dtype].itemsize
    return lambda size: max(size, 4) if world.kind == "cpu" else size


def replicated(profile: Profile, world: World, bucket_mb: float, travels: Width) -> Estimate:
    """Whole on every rank; gradients are averaged in buckets, which they are views of afterwards."""
    if world.ranks == 1:
        return estimate(profile, world)
    sent = Sent(profile, world, bucket_mb, travels)
    return estimate(profile, world, travelling=sent.travelling, sent=sent.bytes)


# -- shares ---------------------------------------------------------------------------------------


def largest_share(weights: Sequence[Weight], owners: Sequence[int], bytes: Callable[[Weight], int]) -> int:
    """The bytes of the owner that has the most."""
    held: dict[int, int] = {}
    for weight, owner in zip(weights, owners, strict=True):
        held[owner] = held.get(owner, 0) + bytes(weight)
    return max(held.values(), default=0)


# -- batches that are cut -------------------------------------------------------------------------


def divided(profile: Profile, parts: int, here: int = 1) -> Activations:
    """Where a model computes a batch in parts, one after another at a time, and so many of them `here`: what waits for
    the backward is there of each, what is made for a moment is of one. What is made of the output (the loss and its
    gradient) is of the whole batch."""
    waiting = sum(unit.activations for unit in profile.units)
    loss = 3 * output(profile)

    def held(activations: int) -> int:
        whole = min(activations, loss)
        kept = min(activations - whole, waiting)
        return whole + math.ceil((kept * here + activations - whole - kept) / parts)

    return held


def output(profile: Profile) -> int:
    """Bytes of what the model returns."""
    whole = [unit for unit in profile.units if not unit.path]
    return (whole or profile.units)[-1].output if profile.units else 0
