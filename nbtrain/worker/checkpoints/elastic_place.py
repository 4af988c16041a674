"""Where an elastic run goes on after it was cut short: the last place at which nothing was under way.

Weights are those after a whole step. What else has moved on since then (a schedule that stepped while the next step was
already to fail) is put back to what it was at that place. Where a run was cut short below `optimizer.step()`, in the
body of its loop, it goes on behind that step all the same: what stands below is then not done.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.worker.data.loop_position import LoopPositions
from nbtrain.worker.loop.steps import Steps


@dataclass
class Place:
    """One of them."""

    loops: list[dict[str, Any]]
    calls: int
    """steps that optimizers had taken"""
    schedules: list[tuple[LRScheduler, dict[str, Any]]] = field(default_factory=list)
    rates: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """group of an optimizer, and its learning rate"""


class ElasticPlace:
    """Of one cell, on one rank."""

    def __init__(self, positions: LoopPositions, steps: Steps, objects: Callable[[], Mapping[str, Any]]) -> None:
        self._positions, self._steps, self._objects = positions, steps, objects
        self._between: Place | None = None
        """where the last step had ended, with all that belongs to it"""
        self._stepped: Place | None = None
        """where an optimizer had just stepped"""

    def at_boundary(self) -> None:
        """Between two steps."""
        place = Place(self._positions.state(in_a_step=True), self._steps.calls)
        for item in self._objects().values():
            if isinstance(item, LRScheduler):
                place.schedules.append((item, copy.deepcopy(item.state_dict())))
            elif isinstance(item, Optimizer):
                place.rates += [(group, copy.deepcopy(group.get("lr"))) for group in item.param_groups]
        self._between = place

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._stepped = Place(self._positions.state(in_a_step=True), self._steps.calls)

    def go_back(self) -> tuple[bytes | None, bool]:
        """Put back what moved on. Returns the loops' places, pickled, and whether the last step's body was left."""
        between, stepped = self._between, self._stepped
        if between is not None and between.calls == self._steps.calls:
            for schedule, state in between.schedules:
                schedule.load_state_dict(state)
            for group, rate in between.rates:
                group["lr"] = rate
            return pickle.dumps(between.loops, 5), False
        if stepped is not None and stepped.calls == self._steps.calls:
            return pickle.dumps(stepped.loops, 5), True
        return None, False
