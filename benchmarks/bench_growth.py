"""What is predicted for 8 ranks from 1, 2 and 4, and what is measured there: the ranks are processes that share the
machine's cores.

Steps are timed inside the cell, one thread a rank; of a cell's steps the median counts. The counts of ranks are taken
in turns, forth and back, so that what drifts meets all of them; a count's time is the median of its cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.measure import Table, kernel, run, say
from nbtrain.annexes.planning.growth.growth import Growth, MeasuredStep, Volume, fit, ring
from nbtrain.annexes.planning.growth.growth_table import GrowthForecast
from nbtrain.machine import host
from tests.support.kernels import Kernel

COUNTS = (1, 2, 4, 8)
BATCH, ROUNDS, WARM = 16, 2, 2
MODELS = {
    "a small transformer": (
        "nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 2)",
        f"torch.randn({BATCH}, 16, 128)",
        12,
    ),
    "an MLP": (
        "nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)])",
        f"torch.randn({BATCH}, 512)",
        12,
    ),
}
MODEL = """
import time, torch
from torch import nn
model = {model}
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = {batch}
"""
TRAIN = f"""%%distributed -s {{strategy}} --devices {{ranks}}
torch.set_num_threads(1)
stamps = []
barrier()
for step in range({{steps}} + {WARM}):
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    stamps.append(time.perf_counter())
barrier()
times = sorted(b - a for a, b in zip(stamps[{WARM} - 1:], stamps[{WARM}:]))
took = reduce(times[len(times) // 2])
"""


def volume(strategy: str, size: float) -> Volume:
    """Bytes of a step, of a model of `size`: ddp averages gradients in a ring; fsdp gathers weights twice, and deals
    gradients out once."""
    if strategy == "ddp":
        return ring(size)
    return lambda ranks: 3 * (ranks - 1) / ranks * size


def measured(k: Kernel, strategy: str, steps: int) -> Iterator[tuple[int, float]]:
    for _ in range(ROUNDS):
        for ranks in (*COUNTS, *reversed(COUNTS)):
            line = "single --devices 1" if ranks == 1 else f"{strategy} --devices {ranks}"
            run(k, TRAIN.replace("{strategy} --devices {ranks}", line).replace("{steps}", str(steps)))
            yield ranks, run(k, say("float(took)"))


def growth(k: Kernel, strategy: str, steps: int) -> Growth:
    size = 4.0 * run(k, say("sum(p.numel() for p in model.parameters())"))
    sent, cores = volume(strategy, size), host.cores_allowed()
    seconds: dict[int, list[float]] = {}
    for ranks, took in measured(k, strategy, steps):
        seconds.setdefault(ranks, []).append(took)
    return fit(
        [
            MeasuredStep(ranks=n, seconds=statistics.median(took), samples=BATCH * n, cores=cores)
            for n, took in seconds.items()
        ],
        sent,
    )


def main() -> None:
    table = Table(f"growth on {host.cores_allowed()} cores: what is predicted for 8 ranks from 1, 2 and 4")
    with kernel("%load_ext nbtrain") as k:
        for name, (model, batch, steps) in MODELS.items():
            for strategy in ("ddp", "fsdp"):
                run(k, MODEL.format(model=model, batch=batch))
                found = growth(k, strategy, steps)
                check = found.checks[-1]  # the one that was held back
                times = ", ".join(f"{one.point.ranks}: {1e3 * one.point.seconds:.1f}" for one in found.checks)
                told = f"ms a step on {times}; predicted {1e3 * check.expected:.1f}"
                table.row(f"{name}, {strategy}: off by", 100 * abs(check.error), 25, "%", told)
    print(f"\nthe last one, on nodes of 8 with 25 GB/s between them:\n\n{GrowthForecast.of(found, 25e9)}")


if __name__ == "__main__":
    main()
