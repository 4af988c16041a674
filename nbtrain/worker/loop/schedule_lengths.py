"""Finds schedules that count steps and were made for as many of them as one process takes.

A step of several ranks, or of `--accumulate`, uses several batches: an epoch has fewer steps than `len(loader)` was in
the notebook, and a schedule made with that number ends half way. One that is made inside the cell has the right number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from nbtrain.compat.optimizers import inner_schedules, milestones
from nbtrain.exchange.kinds.modules_and_optimizers import SCHEDULES_SENT
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part

if TYPE_CHECKING:
    from nbtrain.worker.data.loaders import Loaders

LENGTHS = ("total_steps", "T_max", "total_iters")
"""Attributes of torch's schedules: the number of steps after which one has come to its end."""


@dataclass(frozen=True, slots=True)
class ShortSchedule:
    """A schedule that has counted fewer steps than in one process."""

    name: str
    kind: str
    moved: int
    """steps that it counted in the cell"""
    length: int
    """after so many it has come to its end; 0: it does not say"""
    certain: bool
    """the length is a number of whole epochs of one process"""

    def sentence(self, batches: int, accumulated: int) -> str:
        """`batches`: how many of one process make a step; `accumulated`: so many of them on one rank."""
        steps = f"len(loader) / {accumulated}" if accumulated > 1 else "len(loader)"
        line = f"make it inside the cell, where {steps} is the number of steps"
        line += "" if accumulated > 1 else ", or write --split-batches"
        of = f" of its {self.length}" if self.length else ""
        said = f"{self.name} ({self.kind}) has moved {self.moved}{of} steps: each step uses {batches} batches"
        if self.certain:
            return f"{said}, so an epoch has fewer steps than len(loader) in the notebook. {line.capitalize()}"
        return f"{said}, and one process takes {batches} times as many. If its length comes from len(loader), {line}"


class ScheduleLengths(Part):
    """Says which schedules a cell has moved too little."""

    def __init__(self, steps: Steps, loaders: Loaders) -> None:
        self.steps, self.loaders = steps, loaders
        self._before: Standing = {}

    def begin(self, cell: Cell) -> None:
        self._before = standing(cell.objects) if cell.scheduled else {}
        self._batches, self._accumulated, self._hands_off = cell.batches, cell.run.accumulate, cell.hands_off

    def advice(self, names: Mapping[str, object], stepped: bool) -> dict[str, str]:
        return self.sentences(names) if stepped else {}

    def sentences(self, names: Mapping[str, object], trial: bool = False) -> dict[str, str]:
        """By name. `trial`: the cell has run its first steps."""
        before, self._before = self._before, {}
        shared = (self.loaders.gave_shares and not self._hands_off) or self._accumulated > 1
        if self._batches == 1 or not shared:
            return {}
        try:
            with self.loaders.evaluations.seen_whole():
                short = short_schedules(before, standing(names), self.steps, self._batches, trial)
        except Exception:  # a schedule of somebody's own may answer anything; a hint breaks no cell
            return {}
        return {f"schedule {one.name}": one.sentence(self._batches, self._accumulated) for one in short}


Standing = Mapping[int, tuple[str, LRScheduler, int]]
"""By its id: the name of a schedule, and where it stood when the cell began."""


def standing(objects: Mapping[str, object]) -> Standing:
    """Where those among a cell's objects stand."""
    return {
        id(value): (name, value, value.last_epoch)
        for name, value in objects.items()
        if isinstance(value, LRScheduler) and type(getattr(value, "last_epoch", None)) is int
    }


def short_schedules(
    before: Standing, now: Standing, steps: Steps, batches: int, trial: bool = False
) -> list[ShortSchedule]:
    """The schedules that count the steps of a cell in which each uses several batches, and that are made for more.

    Asked while `len(loader)` is that of one process. `trial`: only the first steps have run.
    """
    named = {**now, **before}
    inner = {id(part) for _, schedule, _ in named.values() for part in inner_schedules(schedule)}
    epochs = sum(index + 1 for index in steps.epochs.values())
    lengths = list(_lengths(steps.epochs))
    own = [place.total * place.epochs for place in steps.iterators if place.total and place.epochs]
    short_ones = []
    for number, (name, schedule, began) in named.items():
        moved = schedule.last_epoch - (began if number in before else 0)
        if number in inner or moved <= epochs:  # it counts epochs
            continue
        length = length_of(schedule)
        certain = any(length % complete == 0 < length for complete in lengths)
        if trial:
            short = certain and schedule in SCHEDULES_SENT and length not in own
        elif schedule in SCHEDULES_SENT:
            short = _read_to_its_end(steps) and (not length or schedule.last_epoch + 1 < length)
        else:  # made in a cell, as it should be: unless one process comes to its end
            short = abs(schedule.last_epoch * batches - length) <= epochs * batches < length
        if short:
            short_ones.append(ShortSchedule(name, type(schedule).__name__, moved, length, certain))
    return short_ones


def _read_to_its_end(steps: Steps) -> bool:
    """Whether a loader says how many steps there are: a loop that counts them by itself takes as many as it wants."""
    return steps.finished is not None and not steps.finished.evaluates


def _lengths(loaders: Iterable[Any]) -> Iterator[int]:
    for loader in loaders:
        with suppress(TypeError, NotImplementedError):
            if (length := len(loader)) > 1:
                yield length


def length_of(schedule: Any) -> int:
    """The number of steps after which a schedule has come to its end; 0: it does not say."""
    if parts := inner_schedules(schedule):
        if not (turns := milestones(schedule)):
            return max(map(length_of, parts))
        last = length_of(parts[-1])
        return turns[-1] + last if last else 0
    for name in LENGTHS:
        if isinstance(length := getattr(schedule, name, None), (int, float)) and math.isfinite(length):
            return int(length)
    given = [function.keywords for function in getattr(schedule, "lr_lambdas", ()) if isinstance(function, partial)]
    return max((int(words.get("num_training_steps", 0)) for words in given), default=0)  # those of transformers
