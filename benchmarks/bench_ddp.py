"""`ddp` against torch's DistributedDataParallel, whose gradients are views of its buckets, too; and how much of what is
sent is on its way while the backward still computes.

Both train in cells of one kernel, on the same two ranks, in turns: A B B A. `cpu` is the processor time of a step, all
threads of both ranks; `pace` is torch's time for a step over ours.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import Table, kernel, run, say

MODELS = {
    "many small tensors": ("nn.Sequential(*[nn.Linear(32, 32) for _ in range(100)])", "torch.randn(32, 32)", 50),
    "few large tensors": ("nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(3)])", "torch.randn(32, 2048)", 6),
    "a small transformer": (
        "nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 4)",
        "torch.randn(8, 32, 128)",
        20,
    ),
}
START = """
import time, torch
from torch import nn
def timed(model, optimizer, x, steps):
    torch.set_num_threads(1)
    for i in range(steps + 3):
        if i == 3:
            barrier(); began, wall = time.process_time(), time.perf_counter()
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    return (time.process_time() - began) / steps, (time.perf_counter() - wall) / steps
"""
MODEL = """
model = {model}
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = {batch}
"""
OURS = """%%distributed -s ddp --devices 2
cpu, wall = map(reduce, timed(model, optimizer, x, {steps}))
"""
THEIRS = """%%distributed -s none --devices 2
from torch.nn.parallel import DistributedDataParallel
wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
cpu, wall = map(reduce, timed(wrapped, optimizer, x, {steps}))
wrapped = None
"""
OVERLAP = """%%distributed -s ddp --devices 2 --bucket-mb {bucket}
from nbtrain.strategies.kit.gradient_buckets import AllReduce
plain, sent, waited = AllReduce.average, [], []
def average(self, flat):
    began = time.perf_counter()
    wait = plain(self, flat)
    work = next(cell.cell_contents for cell in wait.__closure__ if hasattr(cell.cell_contents, "get_future"))
    work.get_future().then(lambda _: sent.append((began, time.perf_counter())))
    def told():
        began = time.perf_counter()
        mean = wait()
        waited.append(time.perf_counter() - began)
        return mean
    return told
AllReduce.average = average
try:
    timed(model, optimizer, x, {steps})
finally:
    AllReduce.average = plain
busy, end = 0.0, 0.0
for a, b in sorted(sent):
    busy += max(0.0, b - max(a, end))
    end = max(end, b)
hidden = reduce(1 - sum(waited) / busy)
del plain, average, sent, waited, AllReduce
"""


def main() -> None:
    table = Table("ddp against torch's DDP, 2 ranks")
    with kernel("%load_ext nbtrain", START) as k:
        for name, (model, batch, steps) in MODELS.items():
            run(k, MODEL.format(model=model, batch=batch))
            found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
            cells = {"ours": OURS.format(steps=steps), "theirs": THEIRS.format(steps=steps)}
            for _ in range(2):
                for which in ("ours", "theirs", "theirs", "ours"):
                    run(k, cells[which])
                    found[which].append(tuple(run(k, say("[float(cpu), float(wall)]"))))
            pairs = list(zip(found["ours"], found["theirs"], strict=True))
            cpu = statistics.median(a[0] / b[0] for a, b in pairs)
            pace = statistics.median(a[1] / b[1] for a, b in pairs)
            theirs = 1e3 * statistics.median(b[1] for _, b in pairs)
            table.row(f"{name}: our time for a step by torch's", pace, 1 / 0.97, "×", f"torch: {theirs:.2f} ms a step")
            table.row(f"{name}: processor time", cpu, 1 / 0.97, "×")
            shares = []
            for bucket in (25, 1):
                run(k, OVERLAP.format(bucket=bucket, steps=steps))
                shares.append(run(k, say("float(hidden)")))
            print(f"{'':4}    hidden behind the backward: {shares[0]:.0%}; with --bucket-mb 1: {shares[1]:.0%}")


if __name__ == "__main__":
    main()
