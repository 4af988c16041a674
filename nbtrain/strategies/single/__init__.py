"""`single`: one process, one device. Components are moved to the device; nothing else is needed."""

from __future__ import annotations

from nbtrain.strategies.base import Strategy
from nbtrain.strategies.kit.profile_arithmetic import estimate
from nbtrain.strategies.memory_estimate import Estimate, Profile, World


class Single(Strategy):
    """One rank, which sees every batch (`share` of one rank is all there is)."""

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate(profile, world)
