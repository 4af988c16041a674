"""Plans for a model that nobody made, on devices that nobody has: of round numbers."""

from __future__ import annotations

from typing import Any

from nbtrain.annexes.planning.plan.device_memory import DeviceMemory, DeviceRoom
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.annexes.planning.plan.plan_rows import make
from nbtrain.base.specs import PoolSpec
from nbtrain.strategies.memory_estimate import Moment, Profile, Unit, Weight

GB = 10**9


def some_profile(activations: int = 2 * GB, blocks: int = 24, numel: int = 4_000_000) -> Profile:
    """Of a model of equal blocks, trained with Adam."""
    size = 4 * numel
    return Profile(
        model="net",
        weights=tuple(
            Weight(name=f"layers.{i}.w", numel=numel, bytes=size, trains=True, state=2 * size, unit=i)
            for i in range(blocks)
        ),
        units=tuple(
            Unit(
                path=f"layers.{i}", kind="Block", activations=activations // blocks, output=activations // blocks // 10
            )
            for i in range(blocks)
        ),
        buffers=0,
        moments=tuple(Moment(activations * (blocks - i) // blocks, size * i) for i in range(blocks + 1)),
        step=0,
        optimizer="AdamW",
        samples=32,
        precision="32",
    )


def on(room: int, ranks: int = 4, alone: int | None = None, host: int | None = None, kind: str = "cpu") -> DeviceMemory:
    """Ranks that may have so much each."""

    def made(size: int) -> DeviceRoom:
        return DeviceRoom(bytes=size, why=f"{size} bytes are for each")

    names = ("cpu",) * ranks if kind == "cpu" else tuple(f"cuda:{i}" for i in range(ranks))
    pool = PoolSpec(kind=kind, devices=names)
    alone = room if alone is None else alone
    return DeviceMemory(
        pool=pool, precision="32", accumulate=1, alone=made(alone), each=(made(room),) * ranks, host=host,
        limit=max(room, alone),
    )  # fmt: skip


def plan(room: int, ranks: int = 4, **more: Any) -> Plan:
    made = some_profile()
    return make(made, on(room, ranks, **more), recompute="Block")
