"""Where a plan is made for: the devices that were asked for, what each rank may have there, and how that is typed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import nbtrain.machine.probes as probes
from nbtrain.planning.plan.device_room import Room, in_memory, room
from nbtrain.specs import PRECISIONS, Needs, PoolSpec
from nbtrain.strategies.estimates import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """The devices, read once."""

    pool: PoolSpec
    precision: str
    accumulate: int
    alone: Room
    """of one rank that is alone on the first device"""
    each: tuple[Room, ...]
    """of a rank on each device"""
    host: int | None = None
    """bytes of the machine's memory for each of as many ranks as there are devices; None: the devices are no cards"""
    limit: int = 0
    """bytes that the user lets a rank have; 0: as many as there are"""

    @property
    def count(self) -> int:
        return len(self.pool.devices)

    def world(self, needs: Needs) -> World:
        """As a strategy with these needs would have it."""
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

    def room(self, world: World) -> Room:
        """Of the rank that may have the least."""
        if world.ranks == 1 and world.devices == 1:
            return self.alone
        if world.devices > 1 and world.kind == "cpu":  # one process has all of it
            return self.alone
        return min(self.each, key=lambda one: (one.bytes, not one.known))

    def at_most(self, limit: int, why: str) -> Ground:
        """The same where no rank may have more than so many bytes."""

        def less(one: Room) -> Room:
            if one.known and one.bytes <= limit:
                return one
            return replace(one, bytes=limit, known=True, why=f"{why} is what a rank may come to have")

        return replace(self, alone=less(self.alone), each=tuple(map(less, self.each)), limit=limit)

    def may_have(self, world: World, travels: int) -> int | None:
        """That each rank may come to have; None: not known. `travels`: what goes from the notebook to the ranks and
        comes home, in one piece of the machine's memory that all of them see."""
        found = self.room(world)
        if not found.known:
            return None
        one = found.bytes
        shares = self.pool.kind == "cpu" and not (self.limit and one <= self.limit)
        return max(0, one - travels // world.ranks) if shares else one

    def line(self, name: str, world: World, more: Sequence[str] = ()) -> str:
        """What is typed behind `%%distributed`. `more`: what else belongs to the way."""
        alone = world.ranks == 1 and world.devices == 1
        words = [f"--strategy {name}", *more, devices(self.pool, 1 if alone else self.count)]
        if world.nodes > 1:
            words.append(f"--nodes {world.nodes}")
        if world.precision != PRECISIONS[0] and not any(word.startswith("--precision") for word in more):
            words.append(f"--precision {world.precision}")
        if self.accumulate > 1:
            words.append(f"--accumulate {self.accumulate}")
        return " ".join(filter(None, words))


def ground(pool: PoolSpec, precision: str = PRECISIONS[0], accumulate: int = 1, own: Collection[int] = ()) -> Ground:
    """`own`: processes that will make room, because they are the ranks."""
    kind, names = pool.kind, pool.devices
    alone, each = room(kind, names[:1], 1, own)[0], room(kind, names, len(names), own)
    host = in_memory(probes.memory(), len(names), 0).bytes if kind == "cuda" else None
    return Ground(pool=pool, precision=precision, accumulate=accumulate, alone=alone, each=each, host=host)


def devices(pool: PoolSpec, count: int) -> str:
    """`--devices 4`, `--devices "0,2"`: the first so many of the pool's."""
    if pool.kind != "cuda":
        more = " --accelerator tpu" if pool.kind == "tpu" else " --accelerator cpu" if probes.gpus() else ""
        return f"--devices {count}{more}"
    indices = [name.partition(":")[2] for name in pool.devices[:count]]
    shared = " --oversubscribe" if len(set(indices)) < len(indices) else ""
    if shared or indices == [str(at) for at in range(count)]:
        return f"--devices {count}{shared}"
    return f'--devices "{",".join(indices)}"'
