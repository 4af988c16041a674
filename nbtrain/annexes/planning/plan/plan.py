"""A plan: what training a model needs under each strategy, whether it fits here, and which strategy to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

import nbtrain.base.humanize as humanize
from nbtrain.annexes.planning.plan import guide, plan_table
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.base import tables
from nbtrain.machine import registry
from nbtrain.strategies.memory_estimate import Estimate, Profile, World

TIGHT = 0.9
"""share of the memory above which fragmentation may be too much"""
SLOWDOWN = {"no": "no slowdown", "small": "a small slowdown", "any": "any slowdown"}
"""`guide.LOSSES` in words"""
CLEARLY = 0.75
"""share of a failed row's peak below which another row is worth trying, although that estimate was wrong"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One row of the plan: a strategy or preset, with or without activation checkpointing."""

    name: str
    """`fsdp`, `fsdp + --checkpoint-activations Block`"""
    strategy: str
    """as typed behind --strategy"""
    base: str
    """the strategy itself, also for a preset of it"""
    line: str
    """the options, as they are typed: `--strategy fsdp --devices 4`"""
    world: World
    room: int | None
    """bytes that each rank may use, possibly 0; None: not known"""
    host: int | None = None
    """bytes of CPU memory that each rank may use where devices are GPUs; None: they are not"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """the strategy's own options"""
    recompute: tuple[str, ...] = ()
    """classes whose activations are recomputed"""
    estimate: Estimate | None = None
    """None: not known; `note` says why"""
    available: str = ""
    """why it cannot be used here and what would change that; empty: it can be used"""
    note: str = ""
    asks: bool = False
    """the line holds a placeholder that the user has to replace"""
    why: str = ""
    """for the recommended row: the reason, in a sentence"""

    @property
    def way(self) -> tuple[str, bool]:
        """The row's key in the guide: strategy, and whether activations are recomputed."""
        return self.strategy, bool(self.recompute)

    @property
    def place(self) -> int | None:
        """Its position in the guide, the fastest first; None: the guide does not have it."""
        return guide.place(*self.way)

    @property
    def speed(self) -> int:
        """Its position for sorting: what the guide does not have comes last."""
        return len(guide.ORDER) if self.place is None else self.place

    @property
    def does(self) -> str:
        """What a way of the guide saves and costs."""
        assert self.place is not None
        return guide.ORDER[self.place].why

    @property
    def peak(self) -> int:
        """Bytes of a rank or device, at the most."""
        assert self.estimate is not None
        return self.estimate.peak

    @property
    def share(self) -> float | None:
        """Peak as a share of the memory that a rank may use; above 1 it does not fit."""
        if self.estimate is None or self.room is None:
            return None
        host = 0.0 if self.host is None else self.estimate.host / max(1, self.host)
        return max(self.estimate.peak / max(1, self.room), host)

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        share = self.share
        return None if share is None else share <= 1

    @property
    def tight(self) -> bool:
        """It fits, but so closely that an estimate may be wrong."""
        share = self.share
        return share is not None and TIGHT < share <= 1

    @property
    def may_have(self) -> str:
        """The memory that a rank may use, in words."""
        return "an unknown amount" if self.room is None else humanize.size(self.room)

    @property
    def needs(self) -> str:
        """`fsdp needs 1.2 GB per rank`"""
        of = "per rank" if self.world.devices == 1 else "per device"
        return f"{self.name} needs {humanize.size(self.peak)} {of}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All rows for one model on these devices."""

    profile: Profile
    devices: DeviceMemory
    rows: tuple[Planned, ...]
    bandwidth: float | None = None
    """bytes per second between ranks, if the user said so"""
    goal: str = "speed"
    loss: str = "any"
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Planned, ...]:
        """Rows that can be compared: available here, estimated, without a placeholder."""
        return tuple(row for row in self.rows if not row.available and row.estimate is not None and not row.asks)

    @property
    def worthwhile(self) -> tuple[Planned, ...]:
        """Usable rows that save something here: on one device there is nothing to shard."""
        return tuple(row for row in self.usable if self.devices.count > 1 or self._saves_alone(row))

    def _saves_alone(self, row: Planned) -> bool:
        offloads = "offload" in row.strategy and self.devices.pool.kind != "cpu"
        return offloads or row.strategy == "single" or registry.find_strategy(row.base) is None

    @property
    def recommended(self) -> Planned | None:
        """The row to take for the plan's goal. None: nothing fits, and `why` says so."""
        return self.best(self.goal, self.loss)

    @property
    def why(self) -> str:
        """The reason for the recommendation, or what to do where there is none."""
        best = self.recommended
        return best.why if best is not None else self._why_nothing()

    def best(self, goal: str = "speed", loss: str = "any") -> Planned | None:
        """The row for a goal of the guide, with its reason. None: nothing fits."""
        return _fastest(self) if goal == "speed" else _roomiest(self, goal, loss)

    def row(self, strategy: str, recompute: bool = False) -> Planned | None:
        return next((row for row in self.rows if row.way == (strategy, recompute)), None)

    def less_than(self, failed: Planned) -> Planned | None:
        """For a cell that ran out of memory: the fastest row that fits and needs less; if none fits, the one that needs
        least. If the failed row was expected to fit, only clearly less memory counts."""
        most = failed.estimate.peak * (TIGHT if failed.fits is False else CLEARLY) if failed.estimate else float("inf")
        less = [row for row in self.worthwhile if row.peak < most and row.way != failed.way]
        if self.devices.count > 1:
            less = [row for row in less if row.strategy != "single"]
        fitting = [row for row in less if row.fits and not row.tight and row.place is not None]
        return min(fitting, key=attrgetter("speed"), default=None) or min(less, key=attrgetter("peak"), default=None)

    def data(self) -> dict[str, Any]:
        """Everything as JSON, for the table and the picker."""
        best, profile, pool = self.recommended, self.profile, self.devices.pool
        return {
            "model": profile.model,
            "parameters": profile.numel,
            "optimizer": profile.optimizer,
            "samples": profile.samples,
            "precision": self.devices.precision,
            "accumulate": self.devices.accumulate,
            "travels": profile.parameters + profile.buffers + profile.state,
            "limit": self.devices.limit,
            "bandwidth": self.bandwidth,
            "kind": pool.kind,
            "devices": list(pool.devices),
            "nodes": pool.nodes,
            "rooms": [asdict(one) for one in self.devices.each],
            "room": self.devices.each[0].why if self.devices.each else "",
            "rows": [self._row(row) for row in self.rows],
            "goal": self.goal,
            "loss": self.loss,
            "recommended": None if best is None else best.name,
            "why": self.why,
            "notes": [*profile.notes, *self.notes],
        }

    def _row(self, row: Planned) -> dict[str, Any]:
        return {
            "name": row.name,
            "strategy": row.strategy,
            "line": row.line,
            "options": {name: humanize.plain(value) for name, value in row.options.items()},
            "recompute": list(row.recompute),
            "ranks": row.world.ranks,
            "available": row.available,
            "estimate": None if row.estimate is None else asdict(row.estimate),
            "room": row.room,
            "share": row.share,
            "fits": row.fits,
            "tight": row.tight,
            "asks": row.asks,
            "note": row.note,
            "seconds": self.seconds(row),
        }

    def seconds(self, row: Planned) -> float | None:
        """Seconds of communication per step at the stated bandwidth."""
        if self.bandwidth is None or row.estimate is None:
            return None
        return row.estimate.sent / self.bandwidth

    def _why_nothing(self) -> str:
        usable = self.worthwhile
        if not usable:
            return "No strategy that runs here says what it needs."
        if all(row.room is None for row in usable):
            return "The memory of these devices is not known: --compare measures what fits."
        least = min(usable, key=attrgetter("peak"))
        if self.goal != "speed" and self.best() is not None:
            return f"No strategy for the largest {self.goal} with {SLOWDOWN[self.loss]} is available here."
        said = f"Nothing fits: {least.needs}, the least of all, and a rank may use {least.may_have}."
        if least.estimate is not None and (activations := least.estimate.activations) > 0.2 * least.peak:
            return f"{said} {humanize.size(activations)} of it are activations: a smaller batch needs less."
        return f"{said} Its weights, gradients and optimizer state are too large: use more devices or a smaller model."

    def __repr__(self) -> str:
        return tables.blocks_text(plan_table.blocks(self.data()), plan_table.WIDE)

    def _repr_html_(self) -> str:
        return tables.page(plan_table.blocks(self.data()))


def _fastest(plan: Plan) -> Planned | None:
    """The first in the guide's order that fits well, else the first that fits at all. With several devices, `single`
    comes last: on the CPU one rank has the memory of all."""
    several = plan.devices.count > 1
    known = [row for row in plan.worthwhile if row.fits and row.place is not None]
    known.sort(key=lambda row: (row.tight, several and row.strategy == "single", row.speed))
    if not known:
        return None
    best = known[0]
    does = f"it {best.does}{_sends(best)}."
    first = plan.row("ddp" if several else "single")
    if first is None or first.estimate is None or first.way == best.way:
        why = f"{_compared(best)}; {does}"
    elif several and best.strategy == "single" and not best.recompute:
        why = f"{first.needs}, and may use {first.may_have}; one rank alone has all memory. {_compared(best)}."
    else:
        fastest = f"{_compared(best)}, and is the fastest that fits: {does}"
        why = f"{first.needs}, and may use {first.may_have}. {fastest}"
    return replace(best, why=why)


def _roomiest(plan: Plan, goal: str, loss: str) -> Planned | None:
    """The usable way that needs least, among those that the guide names for this goal."""
    advice = guide.GUIDE[goal, loss]
    several = plan.devices.count > 1
    ways = advice.ways if several else ("single", *(way for way in advice.ways if way != "single"))
    named = [row for row in plan.worthwhile if row.fits and row.strategy in ways]
    named = [row for row in named if advice.recompute or not row.recompute]
    named = [row for row in named if not several or row.strategy != "single"]
    best = min(named, key=lambda row: (row.peak, ways.index(row.strategy)), default=None)
    if best is None:
        return None
    why = advice.why if several else f"one device has nothing to divide, and it {best.does}"
    return replace(best, why=f"For the largest {goal} with {SLOWDOWN[loss]}: {_compared(best)}; {why}.")


def _compared(row: Planned) -> str:
    close = ", which is close: the estimate may be that far off" if row.tight else ""
    return f"{row.needs} of the {row.may_have} that it may use{close}"


def _sends(row: Planned) -> str:
    assert row.estimate is not None
    return f"; a rank sends {humanize.size(row.estimate.sent)} per step" if row.estimate.sent else ""
