"""What nbtrain adds to a training step, and its `ddp` against torch's DistributedDataParallel."""

from __future__ import annotations

import statistics

from benchmarks.measure import Table, kernel, run, say

SMALL = """
import torch, time
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
small = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)])
adam = torch.optim.AdamW(small.parameters())
loader = DataLoader(TensorDataset(torch.randn(12800, 16)), batch_size=32)
"""
PROFILED = """%%distributed --devices 2
import cProfile, pstats
profile = cProfile.Profile()
profile.enable()
for x, in loader:
    small(x).sum().backward(); adam.step(); adam.zero_grad()
profile.disable()
stats = pstats.Stats(profile).stats.items()
ours = {f"{at[0].rsplit(chr(47))[-1]}:{at[2]}": own for at, (_, _, own, _, _) in stats if "/nbtrain/" in at[0]}
steps, profile, stats = len(loader), None, None
"""
LARGE = """
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
sgd = torch.optim.SGD(model.parameters(), 1e-3)
x = torch.randn(64, 512)
STEPS = 40
"""
OURS = """%%distributed -s ddp --devices 2
for i in range(STEPS + 5):
    if i == 5: barrier(); began = time.perf_counter()
    model(x).square().mean().backward(); sgd.step(); sgd.zero_grad()
took = time.perf_counter() - began
"""
THEIRS = """%%distributed -s none --devices 2
from torch.nn.parallel import DistributedDataParallel
wrapped = DistributedDataParallel(model)
for i in range(STEPS + 5):
    if i == 5: barrier(); began = time.perf_counter()
    wrapped(x).square().mean().backward(); sgd.step(); sgd.zero_grad()
took = time.perf_counter() - began
wrapped = None
"""


def main() -> None:
    table = Table("training")
    with kernel("%load_ext nbtrain", SMALL, PROFILED) as k:
        run(k, PROFILED)
        found = run(k, say("[ours, steps]"))
        ours, steps = found
        each = 1e6 * sum(ours.values()) / steps
        table.row("our own Python in a step: 20 tensors, loader, hooks; profiled", each, 100, "µs")
        for name, own in sorted(ours.items(), key=lambda item: -item[1])[:6]:
            print(f"{'':4}    {name:<60}{1e6 * own / steps:>9.1f} µs")

        run(k, LARGE)
        ratios, ddps = [], []
        for _ in range(8):
            run(k, OURS)
            mine = run(k, say("took / STEPS"))
            run(k, THEIRS)
            ddps.append(run(k, say("took / STEPS")))
            ratios.append(mine / ddps[-1])
        control = f"torch's DDP: {1e3 * statistics.median(ddps):.2f} ms a step"
        table.row("ddp against torch's DDP, 2 ranks, 2.1 M numbers", statistics.median(ratios), 1.03, "×", control)


if __name__ == "__main__":
    main()
