"""What comes home after a cell: packed by the lead rank, opened by the notebook."""

from __future__ import annotations

from dataclasses import dataclass

from nbtrain.exchange.graph.rank_paths import Way
from nbtrain.exchange.parcel import Parcel

New = tuple[int, str, Way | None]
"""A key the lead gave to a new object, its kind, and where the other ranks find theirs."""


@dataclass(frozen=True, slots=True)
class Home:
    """What the cell changed."""

    parcel: Parcel
    news: tuple[New, ...]
    deleted: tuple[str, ...]
    stayed: tuple[tuple[str, str, bool], ...]
    """path and reason of what stays on the ranks, and whether the notebook has it too"""
