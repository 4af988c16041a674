"""What it costs a rank to say where it stands while it trains: processor time, with it and without it in turns.

    python -m benchmarks.bench_watch [turns]

Ranks train at 50 steps a second, in spells that are watched and spells that are not. The thread that speaks has a clock
of its own, so its part is exact; the marks in the loop are timed by themselves, many at once. What the whole process
uses in either kind of spell is as noisy as the machine, and stands beside them.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.measure import Table, kernel, run, say

SETUP = """
import torch, time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
sgd = torch.optim.SGD(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=64)
found = None
"""
SPELLS = """%%distributed -s ddp --devices 2
import threading
import nbtrain.worker.runtime as runtimes

runtime = runtimes._installed
thread = next(one for one in threading.enumerate() if one.name == "nbtrain-meters")
clock, meters = time.pthread_getcpuclockid(thread.ident), thread._target.__self__
readings, main = meters._readings, runtime.phases._thread

def batches():
    while True:
        for x, in loader: yield x

def spell(watched, steps=150):
    meters._readings = readings if watched else None
    runtime.phases._thread = main if watched else 0
    meters._awake.set()
    barrier()
    began, used, thread = time.perf_counter(), time.process_time(), time.clock_gettime(clock)
    for i in range(steps):
        model(next(data)).square().mean().backward(); sgd.step(); sgd.zero_grad()
        time.sleep(max(0, began + (i + 1) / 50 - time.perf_counter()))
    wall = time.perf_counter() - began
    return [(time.process_time() - used) / wall, (time.clock_gettime(clock) - thread) / wall, steps / wall]

data = batches()
spell(True)
found = [(spell(True), spell(False)) for _ in range(TURNS)]
meters._readings, runtime.phases._thread = readings, main
"""
MARKS = """
from nbtrain.worker.measure.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, UNDECIDED, PhaseTimer
phases = PhaseTimer()
phases.begin(True)
def step():
    phases.mark(DATA); phases.mark(FORWARD); phases.mark(BACKWARD)
    phases.resume(phases.wait())
    phases.mark(UNDECIDED); phases.mark(OPTIMIZER); phases.mark(UNDECIDED)
def timed(times=20000):
    began = time.thread_time()
    for _ in range(times): step()
    return 1e6 * (time.thread_time() - began) / times
"""


def main(turns: int = 4) -> None:
    table = Table("watching, per rank at 50 steps a second")
    with kernel("%load_ext nbtrain", SETUP, MARKS) as k:
        marks = run(k, say("sorted(timed() for _ in range(5))[2]"))
        run(k, SPELLS.replace("TURNS", str(turns)))
        spells = run(k, say("found"))
    watched, bare = (
        [statistics.median(column) for column in zip(*kind, strict=True)] for kind in zip(*spells, strict=True)
    )
    pace = f"{watched[2]:.0f} steps/s, {100 * watched[0]:.0f} % of a core"
    table.row("marks of a step: data, forward, backward, a wait, optimizer", marks, 5, "µs")
    cost = watched[1] - bare[1] + 1e-6 * marks * watched[2]
    table.row("the thread that speaks, of a core", 100 * watched[1], 1, "%", f"without {100 * bare[1]:.2g} %")
    both = 100 * cost / watched[0]
    table.row("both, of the rank's processor time", both, 1, "%", f"{pace}; without {100 * bare[0]:.0f} %")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
