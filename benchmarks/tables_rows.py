"""Which lines the tables have: every strategy of the registry, and the presets that divide something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbtrain.base import humanize
from nbtrain.machine import registry
from nbtrain.notebook.magics import strategy_table
from nbtrain.strategies import presets
from tests.support.variants import buckets

DIVIDES = {"stage", "sharding"}
"""A preset of these alone is a row of its own; offloading to the memory that is measured saves none."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    line: str
    """how a user writes it"""
    ranks: int
    shards: str
    lacks: str = ""
    """why it cannot be had here"""


def rows(ranks: int, bucket_mb: float) -> list[Row]:
    """In the registry's order. Buckets are small, as they are beside a model that is worth dividing."""
    available = {name: can for name, _, can, *_ in strategy_table.strategies()}
    found: dict[Any, Row] = {}
    for name, entry in registry.strategies().items():
        lacks = "" if available[name] == "yes" else available[name].removeprefix("no: ")
        if lacks:
            found[name] = Row(name, "", ranks, entry.shards, lacks)
            continue
        make = entry.load()
        if make.hands_off or ranks < entry.needs.min_ranks:
            continue
        sizes = buckets(name, bucket_mb)
        devices = min(ranks, entry.needs.max_ranks or ranks)
        for called, options in {name: {}, **_presets(name)}.items():
            line = " ".join(filter(None, [f"-s {called}", humanize.flags(sizes), f"--devices {devices}"]))
            found.setdefault((name, str(make.Options(**options))), Row(called, line, devices, entry.shards))
    return list(found.values())


def dividing(ranks: int, bucket_mb: float) -> list[Row]:
    """ddp, and those that divide the optimizer's state or more."""
    return [row for row in rows(ranks, bucket_mb) if not row.lacks and (row.name == "ddp" or "optimizer" in row.shards)]


def _presets(strategy: str) -> dict[str, dict[str, Any]]:
    known = {name: presets.PRESETS[name] for name in presets.names()}
    mine = {name: one for name, one in known.items() if one.strategy == strategy and not one.asks}
    return {name: dict(one.options) for name, one in mine.items() if one.options and set(one.options) <= DIVIDES}
