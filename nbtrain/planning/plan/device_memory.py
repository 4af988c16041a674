"""The devices that a plan is made for: how many, how much memory a rank may use there, and how they are typed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import nbtrain.machine.gpus as gpus
import nbtrain.machine.host as host
from nbtrain.planning.plan.device_room import DeviceRoom, in_memory, room
from nbtrain.specs import PRECISIONS, Needs, PoolSpec
from nbtrain.strategies.memory_estimate import World


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The devices of a plan, read once, with the options that memory depends on."""

    pool: PoolSpec
    precision: str
    accumulate: int
    alone: DeviceRoom
    """memory for a single rank on the first device"""
    each: tuple[DeviceRoom, ...]
    """memory for one rank on each device"""
    host: int | None = None
    """bytes of CPU memory per rank, with as many ranks as devices; None: the devices are not GPUs"""
    limit: int = 0
    """bytes that a rank may use because the user said so; 0: no limit was given"""

    @property
    def count(self) -> int:
        return len(self.pool.devices)

    def world(self, needs: Needs) -> World:
        """Ranks and devices under a strategy with these needs."""
        together = needs.together and self.count > 1
        ranks = 1 if together or needs.max_ranks == 1 else self.count
        return World(
            ranks=ranks,
            kind=self.pool.kind,
            nodes=self.pool.nodes if ranks > 1 else 1,
            devices=self.count if together else 1,
            precision=self.precision,
            accumulate=self.accumulate,
        )

    def room(self, world: World) -> DeviceRoom:
        """Memory of the rank that may use the least."""
        if world.ranks == 1 and world.devices == 1:
            return self.alone
        if world.devices > 1 and world.kind == "cpu":  # one process has all of it
            return self.alone
        return min(self.each, key=lambda one: (one.bytes, not one.known))

    def at_most(self, limit: int, why: str) -> DeviceMemory:
        """The same devices, with at most so many bytes per rank."""

        def less(one: DeviceRoom) -> DeviceRoom:
            if one.known and one.bytes <= limit:
                return one
            return replace(one, bytes=limit, known=True, why=f"{why} is what a rank may come to have")

        return replace(self, alone=less(self.alone), each=tuple(map(less, self.each)), limit=limit)

    def may_have(self, world: World, travels: int) -> int | None:
        """Bytes that each rank may use; None: not known. `travels`: bytes sent to the ranks and back, which lie in
        memory that all ranks share."""
        found = self.room(world)
        if not found.known:
            return None
        one = found.bytes
        shares = self.pool.kind == "cpu" and not (self.limit and one <= self.limit)
        return max(0, one - travels // world.ranks) if shares else one

    def line(self, name: str, world: World, more: Sequence[str] = ()) -> str:
        """The options as typed behind `%%distributed`. `more`: further options of the row."""
        alone = world.ranks == 1 and world.devices == 1
        words = [f"--strategy {name}", *more, devices(self.pool, 1 if alone else self.count)]
        if world.nodes > 1:
            words.append(f"--nodes {world.nodes}")
        if world.precision != PRECISIONS[0] and not any(word.startswith("--precision") for word in more):
            words.append(f"--precision {world.precision}")
        if self.accumulate > 1:
            words.append(f"--accumulate {self.accumulate}")
        return " ".join(filter(None, words))


def ground(
    pool: PoolSpec, precision: str = PRECISIONS[0], accumulate: int = 1, own: Collection[int] = ()
) -> DeviceMemory:
    """`own`: pids of the current ranks, whose memory counts as free."""
    kind, names = pool.kind, pool.devices
    alone, each = room(kind, names[:1], 1, own)[0], room(kind, names, len(names), own)
    host_bytes = in_memory(host.memory(), len(names), 0).bytes if kind == "cuda" else None
    return DeviceMemory(pool=pool, precision=precision, accumulate=accumulate, alone=alone, each=each, host=host_bytes)


def devices(pool: PoolSpec, count: int) -> str:
    """`--devices 4` or `--devices "0,2"`: the pool's first `count` devices, as typed."""
    if pool.kind != "cuda":
        more = " --accelerator tpu" if pool.kind == "tpu" else " --accelerator cpu" if gpus.gpus() else ""
        return f"--devices {count}{more}"
    indices = [name.partition(":")[2] for name in pool.devices[:count]]
    shared = " --oversubscribe" if len(set(indices)) < len(indices) else ""
    if shared or indices == [str(at) for at in range(count)]:
        return f"--devices {count}{shared}"
    return f'--devices "{",".join(indices)}"'
