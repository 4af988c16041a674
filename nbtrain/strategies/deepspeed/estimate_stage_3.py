"""ZeRO, stage 3: every rank has a part of each weight, and weights are gathered for layers that need them.

DeepSpeed gathers ahead, a bucketful at once: in a flat tensor, out of which they are copied, and which stays until the
last of them has been used. Weights are let go of when they are not needed soon, which in models of less than half a
milliard means: after their backward. Small ones are never let go of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbtrain.strategies.deepspeed.estimate_quantities import FULL, Quantities, StepBytes
from nbtrain.strategies.kit.profile_arithmetic import ring

DEFAULTS = {
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's own, in numbers"""


def walk_three(q: Quantities) -> StepBytes:
    persistent = q.zero["stage3_param_persistence_threshold"]
    walk = StepBytes(buffers=q.frozen // q.ranks)
    walk.buffers += sum(q.bytes(one) for one in q.profile.weights if one.numel <= persistent)
    walk.buffers += _bucket(q)
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
    gathered = GatheredWeights(q)
    walk.coming = 0
    walk.moments += [*gathered.forward(), *gathered.backward(), *_step(q)]
    times = 2 if gathered.again else 1
    walk.sent = q.world.accumulate * (times * ring(q.whole, q.ranks) + ring(q.gradients, q.ranks))
    return walk


def setting(q: Quantities, name: str) -> int:
    found: Any = q.zero.get(name)
    return int(DEFAULTS[name] if found is None else found)


def _capacity(q: Quantities) -> int:
    """Bytes of the bucket of gradients, which is not larger than all of them."""
    return min(int(q.zero["reduce_bucket_size"]), q.numel) * q.width


def _bucket(q: Quantities) -> int:
    return _capacity(q) if q.zero["contiguous_gradients"] else 0


class GatheredWeights:
    """What there is of whole weights."""

    def __init__(self, q: Quantities) -> None:
        self.q = q
        # What is used again within so many numbers is not let go of: on the way back that is, from the end, twice as
        # far as it was.
        most = min(setting(q, "stage3_max_live_parameters"), setting(q, "stage3_max_reuse_distance") // 2)
        self.live = min(q.whole, most * q.width)
        self.flat = min(q.whole, setting(q, "stage3_prefetch_bucket_size") * q.width)
        self.again = self.live < q.whole
        """weights are gathered for the backward, too"""

    def forward(self) -> Iterator[int]:
        yield self.q.course[0][0] + self.live + self.flat

    def backward(self) -> Iterator[int]:
        q = self.q
        for activations, arrived in q.course:
            yield activations + self._left(arrived) + q.largest
        came = 0
        for filled in q.fills(reversed(q.trained), _capacity(q)):
            came += filled
            own = filled if not _bucket(q) else 0
            yield q.left(came) + self._left(came) + own + filled * (1 + q.gloo)

    def _left(self, arrived: int) -> int:
        """When so much of the gradients has come."""
        rest = max(self.q.whole - arrived, 0)
        return min(self.live, rest) + (min(self.flat, rest) if self.again else 0)


def _step(q: Quantities) -> Iterator[int]:
    rest = q.course[-1][0]
    at_once = min(q.stepped, setting(q, "sub_group_size") * FULL)
    if q.optimizer_at == "none":
        yield rest + at_once + (at_once * q.width // FULL if q.width < FULL else 0)
        yield rest + at_once + int(q.passing() * at_once)
    elif q.here(q.optimizer_at):
        yield rest + int(q.passing() * at_once)
    yield rest + q.share // q.width  # of each gradient, whether it is infinite
