"""How much memory a rank may come to have: what a device has, less what others hold of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import nbtrain.machine.devices as devices
import nbtrain.machine.probes as probes
import nbtrain.words as words
from nbtrain.machine.probes import Gpu

INTERPRETER = 120 * 10**6
"""bytes of its own that a rank has before it has a model: a fork of a process that has imported torch"""
CONTEXT = 600 * 10**6
"""bytes of a card that CUDA and its libraries take for each process that computes there"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Of one rank."""

    device: str
    """as torch calls it"""
    total: int
    """bytes that the device has; of the CPU: what may be used here"""
    others: int
    """held by somebody else than this notebook's ranks"""
    bytes: int
    """that this rank may come to have"""
    why: str
    """how that came about, in a sentence"""
    known: bool = True
    """False: nobody says what the device has, so `bytes` means nothing"""


def room(kind: str, names: Sequence[str], ranks: int, own: Collection[int] = ()) -> tuple[Room, ...]:
    """One for each rank; with one rank that has several devices, one for each of these. `names`: the devices, as torch
    calls them. `own`: processes that will make room, because they are the ranks."""
    if kind == "cuda":
        cards = devices.here().cards()
        return tuple(on_card(name, _card(name, cards), names.count(name), own) for name in names)
    held = sum(probes.private_memory(pid) or 0 for pid in own)
    return (in_memory(probes.memory(), ranks, held),) * ranks


def in_memory(memory: probes.HostMemory, ranks: int, own: int = 0) -> Room:
    """Of the machine's memory. `own`: bytes that our ranks hold now."""
    free = min(memory.limit, memory.available + own)
    others = memory.limit - free
    each = max(0, free // ranks - INTERPRETER)
    limit = words.size(memory.limit)
    of = f"the machine's {limit}" if memory.limit == memory.host else f"the {limit} that this container may use"
    why = f"{words.size(others)} of {of} are held by others, the notebook among them"
    return Room(device="cpu", total=memory.limit, others=others, bytes=each, why=f"{why}; {_left(free, each, ranks)}")


def on_card(name: str, card: Gpu | None, ranks: int, own: Collection[int] = ()) -> Room:
    """Of one card. `ranks`: that share it."""
    if card is None or not card.total:
        why = f"the driver does not say how much {name} has"
        return Room(device=name, total=0, others=0, bytes=0, why=why, known=False)
    ours = sum(user.memory or 0 for user in card.users if user.pid in own)
    others = max(0, card.used - ours)
    free = card.total - others
    each = max(0, free // ranks - CONTEXT)
    why = f"{words.size(others)} of the {words.size(card.total)} of {name} are held by others"
    if mine := sum(user.memory or 0 for user in card.users if user.pid == os.getpid()):
        why += f", {words.size(mine)} of it by the notebook itself"
    return Room(device=name, total=card.total, others=others, bytes=each, why=f"{why}; {_left(free, each, ranks)}")


def _left(free: int, each: int, ranks: int) -> str:
    if ranks == 1:
        return f"a rank may come to have {words.size(each)}"
    return f"{words.size(free)} among {ranks} ranks are {words.size(each)} for each"


def _card(name: str, cards: Sequence[Gpu]) -> Gpu | None:
    index = int(name.partition(":")[2] or 0)
    return cards[index] if index < len(cards) else None
