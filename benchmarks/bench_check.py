"""What the pickle check costs: `%distributed check` of a model of 100 million parameters that can travel.

    python benchmarks/bench_check.py

A cell itself pays nothing for it: what is refused is found by the walk that finds what to send.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Table, in_turns
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.notebook.sync.check_report import check


def main() -> None:
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(100)))
    namespace: dict[str, Any] = {"__name__": "__main__", "model": model, "torch": torch}
    tensors = list(model.parameters())

    def timed(act: Any) -> float:
        began = perf_counter()
        act()
        return (perf_counter() - began) * 1e3

    table = Table("the pickle check")
    control, spent = in_turns(
        9,
        lambda: timed(lambda: [checksum(one) for one in tensors]),
        lambda: timed(lambda: check(namespace, None, {}, ["model"])),
    )
    assert check(namespace, None, {}, ["model"])
    table.row("check of 100M parameters", spent, 2 * control + 30, "ms", f"reading the bytes once: {control:.3g} ms")


if __name__ == "__main__":
    main()
