"""The devices that a plan is made for: how many, how much memory a rank may use there, and how they are typed.

A rank may use what the device has, less what other processes hold.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import nbtrain.base.humanize as humanize
import nbtrain.machine.devices as devices
import nbtrain.machine.gpus as gpus
import nbtrain.machine.host as host
from nbtrain.base.specs import PRECISIONS, Needs, PoolSpec
from nbtrain.machine.gpus import Gpu
from nbtrain.strategies.memory_estimate import World

INTERPRETER = 120 * 10**6
"""private bytes of a rank without a model: a fork of a process that has imported torch"""
CONTEXT = 600 * 10**6
"""bytes that CUDA and its libraries take of a GPU for each process"""
NCCL = 600 * 10**6
"""bytes that NCCL takes besides, in each of several ranks: an H100 had 1.2 GB less for every rank of a group"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRoom:
    """Memory that one rank may use, and why."""

    bytes: int
    """bytes that this rank may use"""
    why: str
    """how that number comes about, in a sentence: what the device has, and what others hold of it"""
    known: bool = True
    """False: the size of the device is not known, and `bytes` means nothing"""


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

    @classmethod
    def of(
        cls, pool: PoolSpec, precision: str = PRECISIONS[0], accumulate: int = 1, own: Collection[int] = ()
    ) -> DeviceMemory:
        """`own`: pids of the current ranks, whose memory counts as free."""
        kind, names = pool.kind, pool.devices
        alone, each = device_rooms(kind, names[:1], 1, own)[0], device_rooms(kind, names, len(names), own)
        host_bytes = in_memory(host.memory(), len(names), 0).bytes if kind == "cuda" else None
        return cls(pool=pool, precision=precision, accumulate=accumulate, alone=alone, each=each, host=host_bytes)

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
        if world.ranks == 1 and (world.devices == 1 or world.kind == "cpu"):  # on the CPU one process has all of it
            return self.alone
        return min(self.each, key=lambda one: (one.bytes, not one.known))

    def at_most(self, limit: int, why: str) -> DeviceMemory:
        """The same devices, with at most `limit` bytes per rank."""

        def less(one: DeviceRoom) -> DeviceRoom:
            if one.known and one.bytes <= limit:
                return one
            return replace(one, bytes=limit, known=True, why=f"{why} is what a rank may use")

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
        words = [f"--strategy {name}", *more, devices_flag(self.pool, 1 if alone else self.count)]
        if world.nodes > 1:
            words.append(f"--nodes {world.nodes}")
        if world.precision != PRECISIONS[0] and not any(word.startswith("--precision") for word in more):
            words.append(f"--precision {world.precision}")
        if self.accumulate > 1:
            words.append(f"--accumulate {self.accumulate}")
        return " ".join(filter(None, words))


def device_rooms(kind: str, names: Sequence[str], ranks: int, own: Collection[int] = ()) -> tuple[DeviceRoom, ...]:
    """Memory for each rank, or for each device of a single rank. `names`: the devices, as torch calls them. `own`: pids
    of the current ranks, whose memory counts as free."""
    if kind == "cuda":
        cards = devices.here().cards()
        taken = CONTEXT + (NCCL if len(names) > 1 else 0)
        return tuple(on_card(name, _card(name, cards), names.count(name), own, taken) for name in names)
    held = sum(host.private_memory(pid) or 0 for pid in own)
    return (in_memory(host.memory(), ranks, held),) * ranks


def in_memory(memory: host.HostMemory, ranks: int, own: int = 0) -> DeviceRoom:
    """Memory per rank on the CPU. `own`: bytes that the current ranks hold."""
    free = min(memory.limit, memory.available + own)
    others = memory.limit - free
    each = max(0, free // ranks - INTERPRETER)
    limit = humanize.size(memory.limit)
    of = f"the machine's {limit}" if memory.limit == memory.host else f"the {limit} that this container may use"
    why = f"{humanize.size(others)} of {of} are in use, by the notebook among others"
    return DeviceRoom(bytes=each, why=f"{why}; {_left(free, each, ranks)}")


def on_card(name: str, card: Gpu | None, ranks: int, own: Collection[int] = (), taken: int = CONTEXT) -> DeviceRoom:
    """Memory per rank on one GPU that `ranks` ranks share. `taken`: bytes that each needs before it has any tensor."""
    if card is None or not card.total:
        return DeviceRoom(bytes=0, why=f"the driver does not report the memory of {name}", known=False)
    ours = sum(user.memory or 0 for user in card.users if user.pid in own)
    others = max(0, card.used - ours)
    free = card.total - others
    each = max(0, free // ranks - taken)
    why = f"{humanize.size(others)} of the {humanize.size(card.total)} of {name} are in use by others"
    if mine := sum(user.memory or 0 for user in card.users if user.pid == os.getpid()):
        why += f", {humanize.size(mine)} of it by the notebook itself"
    return DeviceRoom(bytes=each, why=f"{why}; {_left(free, each, ranks)}")


def _left(free: int, each: int, ranks: int) -> str:
    if ranks == 1:
        return f"a rank may use {humanize.size(each)}"
    return f"{ranks} ranks share {humanize.size(free)}, {humanize.size(each)} each"


def _card(name: str, cards: Sequence[Gpu]) -> Gpu | None:
    index = int(name.partition(":")[2] or 0)
    return cards[index] if index < len(cards) else None


def devices_flag(pool: PoolSpec, count: int) -> str:
    """`--devices 4` or `--devices "0,2"`: the pool's first `count` devices, as typed."""
    if pool.kind != "cuda":
        more = " --accelerator tpu" if pool.kind == "tpu" else " --accelerator cpu" if gpus.gpus() else ""
        return f"--devices {count}{more}"
    indices = [name.partition(":")[2] for name in pool.devices[:count]]
    shared = " --oversubscribe" if len(set(indices)) < len(indices) else ""
    if shared or indices == [str(at) for at in range(count)]:
        return f"--devices {count}{shared}"
    return f'--devices "{",".join(indices)}"'
