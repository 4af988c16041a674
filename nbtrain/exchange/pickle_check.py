"""What cannot travel, named: the way to it as a person would write it, the reason, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from nbtrain.errors import CannotTravel
from nbtrain.exchange import kinds
from nbtrain.exchange.walk import Culprit

REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("generator", "list_iterator", "coroutine", "zip", "map", "filter"),
        "make it inside the cell, or send list(...) of it",
    ),
    (
        ("lock", "RLock", "Condition", "Event", "Semaphore", "Thread"),
        "make it inside the cell, or leave it out in __getstate__",
    ),
    (
        ("TextIOWrapper", "BufferedReader", "BufferedWriter", "FileIO"),
        "send the file's name and open it inside the cell",
    ),
    (("socket", "Connection", "Cursor", "Popen"), "open it inside the cell"),
)


def path_of(culprit: Culprit) -> str:
    """`odd.tricks['guard']`: from the name through everything that leads to the object."""
    address, *chain = culprit.trail
    for holder, child in pairwise(chain):
        kind = kinds.kind_of(holder, {})
        address = kind.address(address, holder, child) if kind is not None else address
    return str(address)


def remedy(obj: Any) -> str:
    name = type(obj).__name__
    for names, text in REMEDIES:
        if name in names:
            return text
    return "make it inside the cell, or give its class a __getstate__ that leaves out what cannot travel"


def refusal(culprits: Iterable[Culprit]) -> CannotTravel:
    """One error that names them all."""
    lines = []
    for culprit in culprits:
        obj = culprit.trail[-1]
        cls = type(obj)
        name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
        lines.append(f"{path_of(culprit)} ({name}) cannot travel to the ranks: {culprit.reason}; {remedy(obj)}")
    return CannotTravel("\n".join(lines))
