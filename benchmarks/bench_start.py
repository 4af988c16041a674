"""How long it takes until the first distributed cell has run."""

from __future__ import annotations

import statistics

from benchmarks.measure import Table, kernel, median, python, run, say, seconds

LOAD = f"""
import sys, time
began = time.perf_counter()
get_ipython().run_line_magic("load_ext", "nbtrain")
took = time.perf_counter() - began
assert "torch" not in sys.modules
{say("took")}
"""
FIRST = "%%distributed --devices 4\npass"


def main() -> None:
    table = Table("start")
    loads, firsts = [], []
    for _ in range(3):
        with kernel() as k:
            loads.append(run(k, LOAD))
            firsts.append(loads[-1] + seconds(k, FIRST))
    table.row("%load_ext nbtrain, without torch", statistics.median(loads), 0.15, "s")

    imports = median(3, lambda: python("import torch, torch._dynamo"))
    what = "from %load_ext to the end of a first cell, 4 ranks"
    control = f"importing torch, torch._dynamo: {imports:.2f} s"
    table.row(what, statistics.median(firsts), 1.2 * imports + 0.4, "s", control)

    with kernel("%load_ext nbtrain", FIRST) as k:

        def first() -> float:
            run(k, "%distributed stop")
            return seconds(k, FIRST)

        table.row("a first cell, the nursery warm, process group of 4 ranks", median(7, first), 0.25, "s")


if __name__ == "__main__":
    main()
