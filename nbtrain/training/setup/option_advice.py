"""What to say of a cell's options: the batch that makes a step, and advice on options of strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler

import nbtrain.humanize as humanize
from nbtrain.training.data.batch_dealing import Deal

SMALL = 16 * 2**30
"""Bytes of a card from which on it has room enough for buckets."""
PART = 0.02
"""The part of the card's memory below which buckets are not mentioned."""

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
    """Name → sentence, each shown once per notebook. `options`: the strategy's."""
    given = {one.name: getattr(options, one.name) for one in fields(options)} if is_dataclass(options) else {}
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return dict(_of(given, room))


def _of(given: dict[str, Any], room: int) -> Iterator[tuple[str, str]]:
    """(name, sentence) pairs. `room`: bytes of the card, 0 on a CPU."""
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


def batch_notes(objects: Mapping[str, object], deal: Deal, accumulate: int, who: str) -> list[str]:
    """The effective batch, once per batch size: `batch 32 × 4 = 128`. `who`: what the batches are split over.

    A loop that evaluates sees its loader's batches as they are: of several loaders those that shuffle count."""
    notes: list[str] = []
    if not (loaders := [item for item in objects.values() if isinstance(item, DataLoader)]):
        return notes
    for loader in [one for one in loaders if not isinstance(one.sampler, SequentialSampler)] or loaders:
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int) or isinstance(size, bool):
            continue
        note = f"batch {size}"
        if deal.count > 1:
            note += f" split over {deal.count} {who}" if deal.split else f" × {deal.at_a_time}"
        if accumulate > 1:
            note += f" × {accumulate} accumulated"
        if (times := accumulate * deal.at_a_time) > 1:
            note += f" = {size * times}"
        if note not in notes and note != f"batch {size}":
            notes.append(note)
    sure = len(notes) == 1 and any(isinstance(item, Optimizer) for item in objects.values())
    return notes if sure else [f"{note} where it trains" for note in notes]
