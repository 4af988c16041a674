"""How long `nbtrain.predict` takes until a million predictions are home, beside one process that computes them."""

from __future__ import annotations

from functools import partial

from benchmarks.measure import Table, in_turns, kernel, run

START = """
import time, torch, nbtrain
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
row = nn.Linear(10, 10)
rows = DataLoader(TensorDataset(torch.randn(1_000_000, 10)), 10_000)
def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
def predicted(): return seconds(lambda: nbtrain.predict(row, rows, accelerator="cpu", devices=2, strategy="ddp"))
def alone():
    with torch.no_grad():
        return seconds(lambda: torch.cat([row(x) for x, in rows]))
"""


def main() -> None:
    table = Table("nbtrain.predict, 2 ranks")
    with kernel("%load_ext nbtrain", START) as k:

        def seconds(what: str) -> float:
            return float(run(k, f"import json; print('measured:' + json.dumps({what}()))"))

        for what in ("predicted", "alone"):
            seconds(what)
        one, whole = in_turns(5, partial(seconds, "alone"), partial(seconds, "predicted"))
        table.row("a million rows of 10, by one process's time", whole / one, 2.0, "×", f"alone: {1e3 * one:.0f} ms")


if __name__ == "__main__":
    main()
