"""What is exported of a notebook, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.specs import RunSpec


@dataclass(slots=True)
class Exported:
    text: str
    saved: dict[str, Any] = field(default_factory=dict)
    """objects that no cell makes, to be saved beside the script"""
    notes: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    """the texts of its cells, for a notebook"""


@dataclass(frozen=True)
class Source:
    """What is exported."""

    title: str
    cell: str
    """its text, without the magic"""
    number: int
    history: Mapping[int, str]
    """number → text of the cells before it that were run and did not fail"""
    others: Mapping[int, str]
    """number → text of other distributed cells before it"""
    namespace: dict[str, Any]
    run: RunSpec
    objects: str
    """the file that what is saved goes to"""
    checkpoint: str
    """that of --resume; empty: there is none"""
    latest: bool
    """no other distributed cell was run after it: the notebook has what it has trained"""
