"""What a plan's profile costs: of a transformer of 1 billion parameters, which is not there.

    python benchmarks/bench_plan.py

The control are the same operations, as often, on torch's device "meta" alone: what torch itself takes for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import nn

import nbtrain
from benchmarks.measure import Table, in_turns
from nbtrain.annexes.planning.profile.profile import profile
from tests.support.planned import billion, loss, transformer, transformer_batch

GOAL = 2.0
NOTHING = 50.0
"""Megabytes: less than one of its 20 blocks' weights take."""


def main() -> None:
    profile(transformer(), transformer_batch())  # what is imported for it
    with nbtrain.empty():
        model = billion()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = transformer_batch(8, vocabulary=16_000, length=512)
    process = psutil.Process()
    before = process.memory_info().rss
    profile(model, batch, optimizer)
    grown = (process.memory_info().rss - before) / 1e6

    def timed(act: Callable[[], Any]) -> float:
        began = perf_counter()
        act()
        return perf_counter() - began

    table = Table(f"the profile of {sum(p.numel() for p in model.parameters()) / 1e9:.3g} B parameters")
    rows: dict[str, dict[str, Any]] = {
        "one step on shapes": {},
        "the same, blocks computed again": {"recompute": ("Block",)},
        "the same in bf16-mixed": {"precision": "bf16-mixed"},
    }
    for what, options in rows.items():
        control, spent = in_turns(
            5,
            lambda: timed(lambda: step(model, batch)),
            partial(timed, partial(profile, model, batch, optimizer, **options)),
        )
        table.row(what, spent, GOAL, "s", f"forward and backward on the device meta: {control:.2g} s")
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    table.row("memory that the first one took", grown, NOTHING, "MB", f"its weights would take {weights:,.0f} MB")


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = (one.to("meta") for one in batch)
    loss(model(x), y).backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
