"""Advice on some options of strategies, shown once per notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

import nbtrain.humanize as humanize

SMALL = 16 * 2**30
"""Bytes of a card that has little room for buckets."""
PART = 0.02
"""Of the card: buckets that take less are not mentioned."""

OFFLOAD = (
    "offloading leaves room on the card, and a step moves as many bytes for a small batch as for a large one: raise "
    "the batch. --find-batch finds the largest that fits"
)
NVME = (
    "a step under nvme is as fast as its disk reads and writes: `ds_nvme_tune --nvme_dir {folder}` measures that, and "
    'says which values to put into the section "aio" of --config'
)
BUCKETS = (
    "buckets take up to {taken} of this card's {room}: {flags} 10000000 take a fifth, for five times as many messages"
)


def of_options(options: Any, device: torch.device) -> dict[str, str]:
    """Name → sentence. `options`: the strategy's."""
    given = {one.name: getattr(options, one.name) for one in fields(options)} if is_dataclass(options) else {}
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return dict(_of(given, room))


def _of(given: dict[str, Any], room: int) -> Iterator[tuple[str, str]]:
    """`room`: bytes of the card, 0 on a CPU."""
    offloads = {
        name: value for name, value in given.items() if "offload" in name and value not in (False, "none", None)
    }
    if offloads and room:
        yield "offload", OFFLOAD
    if "nvme" in offloads.values():
        yield "nvme", NVME.format(folder=given.get("nvme_path") or "DIR")
    buckets = {name: value for name, value in given.items() if name.endswith("bucket_size")}
    taken = 4 * sum(buckets.values())
    if buckets and 0 < room < SMALL and taken > PART * room:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in buckets)
        yield "buckets", BUCKETS.format(taken=humanize.size(taken), room=humanize.size(room), flags=flags)
