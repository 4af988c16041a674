"""Makes the plan of a model: profiles it and estimates every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbtrain.planning.plan.device_memory import DeviceMemory
from nbtrain.planning.plan.plan import Plan
from nbtrain.planning.plan.plan_rows import make
from nbtrain.planning.profile.profile import profile
from nbtrain.planning.profile.recompute import recomputed, repeated
from nbtrain.planning.profile.subject import Subject
from nbtrain.strategies.memory_estimate import Profile


def plan(
    found: Subject,
    ground: DeviceMemory,
    *,
    own: Mapping[str, Any] | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    bandwidth: float | None = None,
    goal: str = "speed",
    loss: str = "any",
) -> Plan:
    """The plan, as `rows.make` makes it. Profiling allocates nothing for the model."""
    made = profile_of(found, ground.precision)
    blocks = repeated(made)
    return make(
        made,
        ground,
        recomputed=recomputed(made, blocks) if blocks else None,
        own=own,
        given=given,
        bandwidth=bandwidth,
        goal=goal,
        loss=loss,
    )


def profile_of(found: Subject, precision: str) -> Profile:
    """The profile, with the model's name in the notebook and notes on what was chosen."""
    made = profile(found.model, found.batch, found.optimizer, precision=precision)
    return replace(made, model=found.name, notes=(*made.notes, *found.notes))
