"""Estimates what a rank holds under `fsdp`: its share of everything, and what is gathered at the time.

A walk through the units, forth and back, with what FSDP2 holds at each of them. For a unit's forward its weights come
in one flat tensor, out of which they are copied; that tensor stays until the next unit's has come. Backwards the next
unit's is gathered meanwhile, and of the last one the gradients that are being sent are kept. gloo needs a copy of what
it gathers or adds up. How the rows of a weight are dealt out (the first ranks may have one more) is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.strategies.kit import profile_arithmetic
from nbtrain.strategies.kit.profile_arithmetic import moments, ring, step_bytes
from nbtrain.strategies.memory_estimate import Estimate, Profile, Unit, Weight, World

HALVES = ("bf16", "fp16")
RULE = "--wrap is not looked at: units are taken to be the model's blocks and its other direct parts"


@dataclass(slots=True)
class GatheredUnit:
    """A unit, in bytes. Everything is counted whole."""

    weights: int = 0
    """as they are gathered"""
    gradients: int = 0
    """as they are computed"""
    sent: int = 0
    """the gradients, as they are reduced"""
    trains: int = 0
    """the gradients, as the profile counts them"""
    before: int = 0
    """activations that are there when its forward begins"""
    after: int = 0
    """and when it ends"""


def estimate(options: Any, profile: Profile, world: World) -> Estimate:
    """`options`: those of FSDP."""
    if world.ranks == 1:
        return profile_arithmetic.estimate(profile, world)
    return StepWalk(options, profile, world).estimate()


def shards(options: Any, ranks: int) -> int:
    """The number of ranks that a weight is divided among."""
    replicas: int = {"HYBRID_SHARD": options.replicas, "NO_SHARD": ranks}.get(options.sharding, 1)
    if ranks % replicas:
        raise UsageError(f"--replicas {replicas}: {ranks} ranks cannot be divided into {replicas} equal parts")
    return ranks // replicas


class StepWalk:
    """Walks through one step of one rank."""

    def __init__(self, options: Any, profile: Profile, world: World) -> None:
        self.options, self.profile, self.world = options, profile, world
        self.among = shards(options, world.ranks)
        self.halves = options.comm_dtype in HALVES
        self.keeps = options.sharding == "SHARD_GRAD_OP"
        """weights stay gathered from forward to backward"""
        self.ahead = 1 if options.limit_all_gathers else 2
        self.gloo = world.kind == "cpu" and self.among > 1
        self.accumulates = world.accumulate > 1
        """gradients of the batches before wait, whole, until they are communicated"""
        self.classes = _classes(options.wrap)
        self.root, self.units = self._units()
        self.bound = 0 if options.cpu_offload and world.kind != "cpu" else 1
        """factor of what is divided: 0 where it is in main memory, and the model is on a GPU"""

    # -- what there is ---------------------------------------------------------------------------

    def _units(self) -> tuple[GatheredUnit, list[GatheredUnit]]:
        """(the part that is left to the model itself, the units in the order of their calls)"""
        profile = self.profile
        ends = [*accumulate(self._activations(unit.activations) for unit in profile.units)]
        units = [GatheredUnit(before=before, after=end) for before, end in zip([0, *ends], ends, strict=False)]
        root = GatheredUnit()
        for weight in profile.weights:
            inner = 0 <= weight.unit < len(units) and self._is_unit(profile.units[weight.unit])
            self._add(units[weight.unit] if inner else root, weight)
        return root, [unit for unit in units if unit.weights]

    def _is_unit(self, unit: Unit) -> bool:
        return bool(unit.path) and (not self.classes or unit.kind in self.classes)

    def _add(self, unit: GatheredUnit, weight: Weight) -> None:
        dtype = self.options.comm_dtype
        unit.weights += 2 * weight.numel if self.halves else weight.bytes
        if weight.trains:
            unit.gradients += 2 * weight.numel if self.halves else weight.bytes
            unit.sent += {"none": weight.bytes, "fp32": 4 * weight.numel}.get(dtype, 2 * weight.numel)
            unit.trains += weight.bytes

    def _activations(self, bytes: int) -> int:
        """Bytes of activations: units compute in the dtype that they are gathered in."""
        return bytes // 2 if self.halves and self.profile.precision == "32" else bytes

    def _share(self, bytes: float) -> int:
        return math.ceil(bytes / self.among)

    # -- forth -----------------------------------------------------------------------------------

    def _arriving(self, number: int, back: bool = False) -> int:
        """Bytes of units that are gathered ahead."""
        if self.among == 1:
            return 0
        ahead = range(number - self.ahead, number) if back else range(number + 1, number + self.ahead)
        return sum(self.units[i].weights for i in ahead if 0 <= i < len(self.units))

    def _forward(self) -> Iterator[int]:
        kept = before = 0
        for number, unit in enumerate(self.units):
            flat = unit.weights if self.among > 1 else 0
            here = kept + self._arriving(number) + unit.before
            yield here + before + flat * (1 + self.gloo)
            yield here + flat + unit.weights
            yield kept + self._arriving(number) + flat + unit.weights + unit.after
            before = flat
            kept += unit.weights if self.keeps else 0

    # -- back ------------------------------------------------------------------------------------

    def _backward(self) -> Iterator[int]:
        """Gradients come unit by unit, and the model's own at the end."""
        pending = sum(unit.gradients for unit in self.units) + self.root.gradients
        course = moments(self.profile)
        full_gradients = self.accumulates
        done = came = leaving = 0
        for number in (*range(len(self.units) - 1, -1, -1), -1):
            unit = self.units[number] if number >= 0 else self.root
            ahead = 0 if self.keeps else self._arriving(max(number, 0), back=True)
            gathered = sum(unit.weights for unit in self.units[:number]) if self.keeps and number > 0 else 0
            fixed = self.bound * done + full_gradients * pending
            fixed = math.ceil(fixed) + gathered
            passing = [m for m in course if came <= m.gradients <= came + unit.trains]
            for m in passing:
                own = (m.gradients - came) * unit.gradients // max(1, unit.trains)
                yield fixed + self._activations(m.activations) + unit.weights + ahead + own + leaving
            if passing:
                left = self._activations(passing[-1].activations)
                yield fixed + left + ahead + unit.gradients + unit.sent
                yield fixed + left + ahead + unit.sent * (1 + self.gloo) + self._share(unit.sent)
            came += unit.trains
            done += self._share(unit.trains)
            pending -= unit.gradients
            leaving = unit.sent

    # -- all of it -------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        profile, bound = self.profile, self.bound
        parameters, gradients, state = map(self._share, (profile.parameters, profile.gradients, profile.state))
        full_gradients = self.accumulates * sum(unit.gradients for unit in (self.root, *self.units))
        first = self._activations(moments(profile)[0].activations)
        kept_whole = self.root.weights + (sum(unit.weights for unit in self.units) if self.keeps else 0)
        extra = [kept_whole + first + full_gradients]
        extra += [self.root.weights + full_gradients + here for here in self._forward()]
        extra += [self.root.weights + here for here in self._backward()]
        step = self._step()
        extra.append(bound * gradients + bound * step)
        shared = parameters + state
        divided = shared + gradients
        most = max(self._activations(m.activations) for m in moments(profile))
        return Estimate(
            parameters=bound * parameters + profile.buffers,
            gradients=max(bound * gradients, full_gradients),
            optimizer=bound * state,
            activations=most,
            buffers=max(max(extra) - most - bound * gradients, 0),
            kept=bound * divided + profile.buffers,
            peak=bound * shared + profile.buffers + max(extra),
            sent=math.ceil(self._sent()),
            host=0 if bound else divided + step,
            notes=(RULE,) if self.classes is None else (),
        )

    def _step(self) -> int:
        """Bytes of the step. Each rank steps its rows of every weight; in main memory one weight at a time."""
        if not self.bound:
            return self._share(self.profile.step)
        step = step_bytes(self.profile, self.world, 1 / self.among)
        return self._share(self.profile.step) if step == self.profile.step else step

    def _sent(self) -> float:
        """Bytes that are sent: weights are gathered for each batch, and the last one's gradients are reduced."""
        among, accumulated = self.among, self.world.accumulate
        units = sum(unit.weights for unit in self.units)
        gathered = self.root.weights + units * (1 if self.keeps else 2)
        reduced = sum(unit.sent for unit in (self.root, *self.units))
        replicas = self.world.ranks // among
        return ring(gathered, among) * accumulated + ring(reduced, among) + 2 * ring(reduced / among, replicas)


def _classes(rule: Any) -> list[str] | None:
    """The names of the classes that are units. None: it is another rule."""
    parts = rule if isinstance(rule, tuple | list | set | frozenset) else [rule]
    if not all(isinstance(part, str | type) for part in parts):
        return None
    words = [part if isinstance(part, str) else part.__name__ for part in parts]
    return [name for word in words for name in word.replace(" ", "").split(",") if name]
