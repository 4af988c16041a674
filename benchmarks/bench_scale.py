"""Whether what is small stays so where there is much of it: cells, names, tensors, ranks, lines, prints, log()s."""

from __future__ import annotations

import statistics

from benchmarks.measure import Table, in_turns, kernel, run, say, seconds
from tests.support.kernels import Kernel

D = "%%distributed --devices 2 --monitor off\n"
CELLS = 2000
TENSORS = """
import torch
from torch import nn
def module(tensors): return nn.ModuleList([nn.Linear(4, 4) for _ in range(tensors // 2)])
few, many = module(1000), module(10_000)
"""
LOGS = f"""{D}import time
began = time.perf_counter()
for i in range(1_000_000): log(loss=i)
took = time.perf_counter() - began"""


def _by_bare(k: Kernel) -> float:
    ours, bare = in_turns(150, lambda: seconds(k, D + "pass"), lambda: seconds(k, "pass"))
    return ours / bare


def latency(table: Table) -> None:
    with kernel("%load_ext nbtrain", *[D + "pass"] * 5) as k:
        first = _by_bare(k)
        times = [1e3 * seconds(k, D + "pass") for _ in range(CELLS)]
        last = _by_bare(k) / first
        table.row(f"an empty cell by a bare one after {CELLS:,}, by before", last, 1.05, "×", f"{first:.2f}")
        rising = sorted(times)
        half, most = rising[len(rising) // 2], rising[int(0.99 * len(rising))]
        table.row("the slowest in a hundred by the median", most / half, 3, "×", f"{half:.1f} ms")


def names(table: Table) -> None:
    with kernel("%load_ext nbtrain", *[D + "pass"] * 5) as k:
        plain = statistics.median(seconds(k, D + "y = 1") for _ in range(40))
        run(k, "for i in range(5000): globals()[f'name{i}'] = [i]")
        run(k, D + "y = name7")
        full = statistics.median(seconds(k, D + "y = 1") for _ in range(40))
        table.row("a cell in a notebook of 5,000 names, more", 1e3 * (full - plain), 5, "ms", f"{1e3 * plain:.1f} ms")


def tensors(table: Table) -> None:
    with kernel("%load_ext nbtrain", TENSORS) as k:
        cells = [D + f"y = sum(1 for p in {name}.parameters())" for name in ("few", "many")]
        for cell in cells:
            run(k, cell)
        few, many = in_turns(7, *[lambda cell=cell: seconds(k, cell) for cell in cells])
        control = f"{1e3 * few:.0f} ms"
        table.row("a cell that reads 10,000 tensors, by one of 1,000", many / few, 12, "×", control)
        table.row("reads 10,000 tensors", many, 0.5, "s")


def entries(table: Table) -> None:
    with kernel("%load_ext nbtrain", "d = {i: float(i) for i in range(1_000_000)}", D + "pass") as k:
        table.row("a dict of a million entries, sent", seconds(k, D + "y = len(d)"), 4, "s")
        again = statistics.median(seconds(k, D + "y = len(d)") for _ in range(5))
        table.row("read again", again, 0.5, "s")


def ranks(table: Table) -> None:
    with kernel("%load_ext nbtrain") as k:
        cell = "%%distributed --devices 16 --monitor off\npass"
        table.row("the first cell on 16 ranks", seconds(k, cell), 12, "s", "2 cores")
        warm = statistics.median(seconds(k, cell) for _ in range(20))
        table.row("a warm cell on 16 ranks", 1e3 * warm, 120, "ms")


def lines(table: Table) -> None:
    with kernel("%load_ext nbtrain", D + "pass") as k:
        cell = D + "".join(f"a{i} = {i} + 1\n" for i in range(5000))
        run(k, cell)
        bare = seconds(k, cell.removeprefix(D))
        table.row("a cell of 5,000 lines, run again", seconds(k, cell), 3, "s", f"{bare:.2f} s without the magic")


def prints(table: Table) -> None:
    with kernel("%load_ext nbtrain", D + "pass") as k:
        text = "for i in range(100_000): print('x' * 999)"
        bare = seconds(k, text)
        ours = seconds(k, f"{D}if rank == 0:\n    {text}")
        table.row("100 MB of prints by a bare cell's", ours / bare, 3, "×", f"{bare:.1f} s")


def logs(table: Table) -> None:
    with kernel("%load_ext nbtrain", D + "pass") as k:
        whole = seconds(k, LOGS)
        table.row("a call of log(), on each of 2 ranks", run(k, say("took")), 5, "µs", "a million calls")
        table.row("the cell that makes a million of them", whole, 5, "s")


def main() -> None:
    table = Table("much of what is small")
    for part in (latency, names, tensors, entries, ranks, lines, prints, logs):
        part(table)


if __name__ == "__main__":
    main()
