"""How much memory a rank may use: what the device has, less what other processes hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import nbtrain.humanize as humanize
import nbtrain.machine.devices as devices
import nbtrain.machine.host as host
from nbtrain.machine.gpus import Gpu

INTERPRETER = 120 * 10**6
"""private bytes of a rank without a model: a fork of a process that has imported torch"""
CONTEXT = 600 * 10**6
"""bytes that CUDA and its libraries take of a GPU for each process"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRoom:
    """Memory that one rank may use, and why."""

    device: str
    """as torch calls it"""
    total: int
    """bytes that the device has; on the CPU what this process or container may use"""
    others: int
    """bytes held by other processes than this notebook's ranks"""
    bytes: int
    """bytes that this rank may use"""
    why: str
    """how that number comes about, in a sentence"""
    known: bool = True
    """False: the size of the device is not known, and `bytes` means nothing"""


def room(kind: str, names: Sequence[str], ranks: int, own: Collection[int] = ()) -> tuple[DeviceRoom, ...]:
    """Memory for each rank, or for each device of a single rank. `names`: the devices, as torch calls them. `own`: pids
    of the current ranks, whose memory counts as free."""
    if kind == "cuda":
        cards = devices.here().cards()
        return tuple(on_card(name, _card(name, cards), names.count(name), own) for name in names)
    held = sum(host.private_memory(pid) or 0 for pid in own)
    return (in_memory(host.memory(), ranks, held),) * ranks


def in_memory(memory: host.HostMemory, ranks: int, own: int = 0) -> DeviceRoom:
    """Memory per rank on the CPU. `own`: bytes that the current ranks hold."""
    free = min(memory.limit, memory.available + own)
    others = memory.limit - free
    each = max(0, free // ranks - INTERPRETER)
    limit = humanize.size(memory.limit)
    of = f"the machine's {limit}" if memory.limit == memory.host else f"the {limit} that this container may use"
    why = f"{humanize.size(others)} of {of} are held by others, the notebook among them"
    return DeviceRoom(
        device="cpu", total=memory.limit, others=others, bytes=each, why=f"{why}; {_left(free, each, ranks)}"
    )


def on_card(name: str, card: Gpu | None, ranks: int, own: Collection[int] = ()) -> DeviceRoom:
    """Memory per rank on one GPU, which so many `ranks` share."""
    if card is None or not card.total:
        why = f"the driver does not say how much {name} has"
        return DeviceRoom(device=name, total=0, others=0, bytes=0, why=why, known=False)
    ours = sum(user.memory or 0 for user in card.users if user.pid in own)
    others = max(0, card.used - ours)
    free = card.total - others
    each = max(0, free // ranks - CONTEXT)
    why = f"{humanize.size(others)} of the {humanize.size(card.total)} of {name} are held by others"
    if mine := sum(user.memory or 0 for user in card.users if user.pid == os.getpid()):
        why += f", {humanize.size(mine)} of it by the notebook itself"
    return DeviceRoom(
        device=name, total=card.total, others=others, bytes=each, why=f"{why}; {_left(free, each, ranks)}"
    )


def _left(free: int, each: int, ranks: int) -> str:
    if ranks == 1:
        return f"a rank may come to have {humanize.size(each)}"
    return f"{humanize.size(free)} among {ranks} ranks are {humanize.size(each)} for each"


def _card(name: str, cards: Sequence[Gpu]) -> Gpu | None:
    index = int(name.partition(":")[2] or 0)
    return cards[index] if index < len(cards) else None
