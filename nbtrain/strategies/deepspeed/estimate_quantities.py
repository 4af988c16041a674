"""What both walks through a step of ZeRO need to know, in bytes, of a profile and a config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.kit.profile_arithmetic import largest, moments, trainable
from nbtrain.strategies.memory_estimate import Profile, Weight, World

FULL = 4
"""bytes of a number that the optimizer steps: of those there is a copy, whatever the model computes with"""
HALF = 2
ADAM = ("Adam", "AdamW")


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
    """`zero`: the config's section."""

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
            return self.profile.step / max(1, largest(self.profile))
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
