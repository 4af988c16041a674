"""ZeRO, stages 1 and 2: weights are whole on every rank, and each steps its part of them.

A bucket is filled with gradients as they come (stage 1: when the step is taken), and added up in a copy. What falls
into the rank's part is copied to a place of its own, from which the step makes a flat tensor of the part. Where the
optimizer is offloaded it goes to the host instead, where it stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.strategies.deepspeed.estimate_quantities import FULL, Quantities, StepBytes
from nbtrain.strategies.kit.profile_arithmetic import ring

DOUBLE = 8
"""bytes of a number of which a norm is taken"""


def walk_two(q: Quantities) -> StepBytes:
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
    walk.moments += _backward(q, owned) if q.stage == 2 else _gathered_later(q, owned)
    walk.moments += _step(q, owned)
    walk.sent = 2 * ring(q.gradients, q.ranks) * (q.world.accumulate if q.stage == 2 else 1)
    walk.sent += ring(q.gradients, q.ranks)
    return walk


def _capacity(q: Quantities) -> int:
    return int(q.zero["reduce_bucket_size"]) * q.width


def _bucket(q: Quantities, filled: int) -> int:
    """Bytes of the bucket: main memory is only taken where it is written to."""
    contiguous = q.zero["contiguous_gradients"] or q.optimizer_at != "none"
    times = 2 if q.zero.get("overlap_comm") and contiguous else 1
    return times * (filled if q.world.kind == "cpu" or not contiguous else _capacity(q))


def _backward(q: Quantities, owned: int) -> Iterator[int]:
    """Stage 2. `owned`: gradients that the rank keeps."""
    capacity = _capacity(q)
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


def _gathered_later(q: Quantities, owned: int) -> Iterator[int]:
    """Stage 1: in the backward as in one process, and then bucket by bucket."""
    capacity = _capacity(q)
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


def _step(q: Quantities, owned: int) -> Iterator[int]:
    rest = q.course[-1][0]
    if q.optimizer_at == "none":
        yield rest + owned + q.largest // q.width * DOUBLE
        yield rest + owned + q.share + (q.stepped if q.width < FULL else 0)
        yield rest + q.stepped + int(q.passing() * q.stepped)
    elif q.here(q.optimizer_at):
        yield rest + int(q.passing() * q.stepped)
    if q.gloo:  # which gathers weights into a copy
        yield rest + q.gradients
