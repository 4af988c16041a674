"""What a distributed cell costs over an ordinary one when everything is warm, and what an idle rank costs."""

from __future__ import annotations

import re
from functools import partial

import psutil

from benchmarks.measure import Table, in_turns, kernel, seconds

MODEL = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(80, 82) if i % 2 else nn.Linear(82, 80) for i in range(150)])
optimizer = torch.optim.AdamW(model.parameters())
"""
TRAIN = "%%distributed --devices 4\nmodel(torch.ones(2, 82)).sum().backward(); optimizer.step(); optimizer.zero_grad()"
USE = "%%distributed --devices 4\nmodel, optimizer;"


def empty(ranks: int) -> str:
    return f"%%distributed --devices {ranks}\npass"


def main() -> None:
    table = Table("a warm cell")
    for ranks, goal in ((2, 1.0), (4, 2.0)):
        with kernel("%load_ext nbtrain", *[empty(ranks)] * 5) as k:
            bare, ours = in_turns(80, lambda: seconds(k, "pass"), partial(seconds, k, empty(ranks)))
            control = f"over a bare cell of {1e3 * bare:.1f} ms"
            table.row(f"empty, {ranks} ranks", 1e3 * (ours - bare), goal, "ms", control)
            if ranks == 4:
                pids = re.findall(r"process (\d+)", k.run("%distributed status").stdout)
                sizes = [psutil.Process(int(pid)).memory_full_info().uss / 1e6 for pid in pids]
                table.row("private memory of an idle rank", max(sizes), 25, "MB", "pages that it shares with nobody")
    with kernel("%load_ext nbtrain", MODEL, TRAIN, *[USE] * 5) as k:
        bare, ours = in_turns(40, lambda: seconds(k, "pass"), lambda: seconds(k, USE))
        control = f"over a bare cell of {1e3 * bare:.1f} ms"
        what = "uses a model of 300 tensors, 1 M numbers, and its AdamW, 4 ranks"
        table.row(what, 1e3 * (ours - bare), 10, "ms", control)


if __name__ == "__main__":
    main()
