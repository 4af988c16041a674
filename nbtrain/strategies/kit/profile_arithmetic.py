"""Arithmetic on a `Profile` that the estimates of several strategies share. Nothing is allocated.

A rank holds the model, what the optimizer keeps, and besides, at each moment of the backward, the activations that are
left, the gradients that have come and what of them is travelling. Its peak is at one of these moments, or when the
optimizer steps. Gradients are taken to be let go of before the next forward, as `zero_grad` does after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from nbtrain.strategies.kit.gradient_buckets import DTYPES, in_buckets
from nbtrain.strategies.memory_estimate import Estimate, Moment, Profile, Weight, World

Width = Callable[[int], int]
"""bytes of one number of a gradient → bytes in which it is sent"""
Activations = Callable[[int], int]
"""bytes of activations in one process → bytes of them on this rank"""
Travelling = Callable[[int], int]
"""bytes of gradients that have come → bytes of their second copies"""


def estimate(
    profile: Profile,
    world: World,
    *,
    gradients: int | None = None,
    optimizer: int | None = None,
    travelling: Travelling = lambda arrived: 0,
    activations: Activations = lambda activations: activations,
    step: int | None = None,
    after: int = 0,
    sent: float = 0,
    notes: Iterable[str] = (),
) -> Estimate:
    """The estimate for a rank that has the whole model. `gradients`, `optimizer`: bytes on this rank, where that is not
    all. `step`, `after`: bytes needed for a moment while the optimizer steps, and once it has."""
    model = profile.parameters + profile.buffers
    kept = profile.gradients if gradients is None else gradients
    state = profile.state if optimizer is None else optimizer
    stepping = step_bytes(profile, world) if step is None else step
    course = moments(profile)
    again = world.accumulate > 1  # gradients of the batches before are there all the time
    fresh = profile.largest if again else 0
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
    """The moments of the backward, and its end, when all gradients are there."""
    last = profile.moments[-1].activations if profile.moments else 0
    return *profile.moments, Moment(last, profile.gradients)


def trainable(profile: Profile) -> list[Weight]:
    return [weight for weight in profile.weights if weight.trains]


def step_bytes(profile: Profile, world: World, share: float = 1.0) -> int:
    """The bytes that a step takes for a moment: for the largest weight on a CPU. On GPUs torch's optimizers step all
    weights at once: for the share of them that a rank steps."""
    return profile.step if world.kind == "cpu" else math.ceil(profile.step_together * share)


def ring(bytes: float, ranks: int) -> float:
    """The bytes that one rank sends in a ring: all-gather, reduce-scatter, or a broadcast in parts."""
    return bytes * (ranks - 1) / ranks


# -- gradients in buckets -------------------------------------------------------------------------


def width(weight: Weight) -> int:
    """Bytes of one number."""
    return weight.bytes // max(1, weight.numel)


class Sent:
    """The buckets in which gradients are averaged, which exist besides the gradients until the backward has ended."""

    def __init__(self, profile: Profile, world: World, bucket_mb: float, travels: Width) -> None:
        self.buckets = in_buckets(trainable(profile), int(bucket_mb * 2**20), lambda weight: weight.bytes, width)
        self.own = [sum(weight.bytes for weight in bucket) for bucket in self.buckets]
        self.flat = [
            own // width(bucket[0]) * travels(width(bucket[0]))
            for own, bucket in zip(self.own, self.buckets, strict=True)
        ]
        self.cast = max((own for own, flat in zip(self.own, self.flat, strict=True) if own != flat), default=0)
        """bytes of the largest bucket that is cast: there is one more copy of it meanwhile"""
        self.bytes = 2 * ring(sum(self.flat), world.ranks)

    def travelling(self, arrived: int) -> int:
        """Bytes of the buckets that are under way. They are sent in order, each when it is full."""
        travelling = came = 0
        for own, flat in zip(self.own, self.flat, strict=True):
            came += own
            if came > arrived:
                break
            travelling += flat
        return travelling + (self.cast if travelling else 0)


def width_sent(dtype: str, world: World) -> Width:
    """The width in which `AllReduce` sends a number. gloo adds up halves as float32."""
    if dtype in DTYPES:
        return lambda _: DTYPES[dtype].itemsize
    return lambda size: max(size, 4) if world.kind == "cpu" else size


def replicated(profile: Profile, world: World, bucket_mb: float, travels: Width) -> Estimate:
    """The estimate where all is whole on every rank, and gradients become views of the buckets they are averaged in."""
    if world.ranks == 1:
        return estimate(profile, world)
    sent = Sent(profile, world, bucket_mb, travels)
    return estimate(profile, world, travelling=sent.travelling, sent=sent.bytes)


# -- shares ---------------------------------------------------------------------------------------


def largest_share(weights: Sequence[Weight], owners: Sequence[int], bytes: Callable[[Weight], int]) -> int:
    """The bytes of the owner that has the most."""
    by_owner: dict[int, int] = {}
    for weight, owner in zip(weights, owners, strict=True):
        by_owner[owner] = by_owner.get(owner, 0) + bytes(weight)
    return max(by_owner.values(), default=0)


# -- batches that are cut -------------------------------------------------------------------------


def divided(profile: Profile, parts: int, here: int = 1) -> Activations:
    """Activations where a model computes a batch in parts, `here` of them on this rank at a time. What waits for the
    backward exists for each part; what is made for a moment is of one. What is made of the output (the loss and its
    gradient) is of the whole batch."""
    waiting = sum(unit.activations for unit in profile.units)
    loss = 3 * output(profile)

    def held(activations: int) -> int:
        of_loss = min(activations, loss)
        kept = min(activations - of_loss, waiting)
        return of_loss + math.ceil((kept * here + activations - of_loss - kept) / parts)

    return held


def output(profile: Profile) -> int:
    """Bytes of what the model returns."""
    models = [unit for unit in profile.units if not unit.path]
    return (models or profile.units)[-1].output if profile.units else 0
