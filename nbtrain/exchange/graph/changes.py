"""The result of a walk: what is sent, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbtrain.exchange.kinds.base import Later, Make, Put

OPTION = "--"
"""The strategy's options travel under names that begin so, as no name of Python's does."""


@dataclass(slots=True)
class Culprit:
    """An object that cannot travel, and the nodes that lead to it."""

    obj: Any
    reason: str
    trail: list[Any]
    """the name first, then each object on the way"""
    known: bool = False
    """both sides have it, and what changed in it cannot be told"""


@dataclass(slots=True)
class Changes:
    """What a walk found, ready to be packed."""

    records: list[Make | Put] = field(default_factory=list)
    buffers: list[memoryview | Later] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    """name → encoded value"""
    places: dict[int, int] = field(default_factory=dict)
    """buffer → key of the memory that it is all of: the readers may have it mapped from last time"""
    rewritten: set[int] = field(default_factory=set)
    """keys of memory that was written again where readers have it mapped, by packing"""
