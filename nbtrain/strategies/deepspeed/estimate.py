"""What a rank holds under `deepspeed`, and what it sends: which of the two walks (stages 1 and 2, stage 3) tells it."""

from __future__ import annotations

import math
from typing import Any

from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.deepspeed.estimate_quantities import Quantities
from nbtrain.strategies.deepspeed.estimate_stage_3 import walk_three
from nbtrain.strategies.deepspeed.estimate_stages_1_2 import walk_two
from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.memory_estimate import Estimate, Profile, World

ON_DISK = "what is kept on nvme is not counted, nor are the buffers through which it comes and goes"
CUT = "what partition_activations and cpu_checkpointing save of activations is not counted"


def estimate(options: Any, profile: Profile, world: World) -> Estimate:
    """`options`: those of DeepSpeed."""
    settings, precision = config.build(options, world.precision)
    if world.ranks == 1 and world.devices == 1:
        return profile_arithmetic.estimate(profile, world)
    known = Quantities(settings, precision, profile, world)
    walk = walk_three(known) if known.stage == 3 else walk_two(known)
    activations = max(found for found, _ in known.course)
    at_most = max(walk.moments)
    gradients = walk.gradients + walk.coming
    return Estimate(
        parameters=walk.parameters + profile.buffers,
        gradients=gradients,
        optimizer=walk.optimizer,
        activations=activations,
        buffers=walk.buffers + max(at_most - activations - walk.coming, 0),
        kept=walk.fixed + profile.buffers,
        peak=walk.fixed + profile.buffers + at_most,
        sent=math.ceil(walk.sent),
        host=walk.host,
        notes=tuple(_notes(settings)),
    )


def _notes(settings: config.Settings) -> list[str]:
    found = []
    if "nvme" in (config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")):
        found.append(ON_DISK)
    section = settings.get("activation_checkpointing") or {}
    if section.get("partition_activations") or section.get("cpu_checkpointing"):
        found.append(CUT)
    return found
