"""What many machines cost the kernel: a warm cell, and Stop. Their ranks are stubs that compute nothing, and all of
their nodes are threads of two processes on this machine, which have its cores to themselves in a cluster.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.measure import Table, kernel, median, run, seconds
from tests.support.kernels import Kernel
from tests.support.stub_nodes import FOREVER, stub_machines

PROCESSES = 2
"""that the nodes share"""
BETWEEN = 3.0
"""Seconds for which ranks step before they are stopped."""


def main() -> None:
    table = Table("many ranks")
    for nodes, each in ((8, 8), (32, 8)):
        magic = f"%%distributed --engine elastic --nodes {nodes} --devices {each} -s none --monitor off\n"
        where = f"{nodes * each} ranks on {nodes} machines"
        with kernel("%load_ext nbtrain") as k, stub_machines(k, nodes, PROCESSES):
            began = time.perf_counter()
            run(k, f"{magic}pass")
            first = time.perf_counter() - began
            for _ in range(3):
                seconds(k, f"{magic}pass")
            warm = median(21, partial(seconds, k, f"{magic}pass"))
            table.row(f"an empty warm cell, {where}", 1e3 * warm, 100, "ms", f"the first one: {first:.1f} s")
            slowest = max(stop(k, magic) for _ in range(6))
            table.row(f"Stop, {where} that step: the slowest of 6", slowest, 1, "s", f"{PROCESSES} processes")
            run(k, "%distributed stop")


def stop(k: Kernel, magic: str) -> float:
    """Seconds from Stop to the end of the cell; all ranks are at the same step then."""
    cell = k.start(f"{magic}{FOREVER!r}")
    time.sleep(BETWEEN)
    began = time.perf_counter()
    k.interrupt()
    k.wait(cell, 60)
    took = time.perf_counter() - began
    if cell.error is None or "stopped after step" not in cell.error.evalue:
        raise RuntimeError(cell.text)
    return took


if __name__ == "__main__":
    main()
