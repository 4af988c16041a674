"""What nbtrain adds to fsdp and DeepSpeed: processor time of a step, and setting a model up, beside the bare library.

Both run on the same ranks, in cells of one kernel: the library's own loop under `-s none`. They are taken in turns,
A B B A, so that what drifts meets both; of the ratios the median is told, and the middle half of them.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import Table, kernel, run, say, seconds

MODEL = """
import copy, time, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))
"""
STEP = """
model = nn.Sequential(*[Block(256) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.randn(64, 256)
WARM, STEPS = 5, 40
def timed(step):
    torch.set_num_threads(1)
    for i in range(WARM + STEPS):
        if i == WARM:
            barrier(); began, wall = time.process_time(), time.perf_counter()
        step()
    return (time.process_time() - began) / STEPS, (time.perf_counter() - wall) / STEPS
"""
OURS = """%%distributed -s {line} --devices 2
def step():
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
cpu, wall = map(reduce, timed(step))
"""
FSDP = """%%distributed -s none --devices 2
from torch.distributed.fsdp import fully_shard
bare = copy.deepcopy(model)
for block in bare:
    fully_shard(block)
fully_shard(bare)
adam = torch.optim.AdamW(bare.parameters(), 1e-4)
def step():
    bare(x).square().mean().backward(); adam.step(); adam.zero_grad()
cpu, wall = map(reduce, timed(step))
del bare, adam, step
"""
ZERO = """%%distributed -s none --devices 2
import os; os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, logging; deepspeed.utils.logger.setLevel(logging.ERROR)
bare = copy.deepcopy(model)
config = dict(train_micro_batch_size_per_gpu=64, gradient_clipping=0.0, zero_allow_untested_optimizer=True,
              zero_force_ds_cpu_optimizer=False, zero_optimization=dict(stage={stage}, **{extra}))
engine, *_ = deepspeed.initialize(model=bare, optimizer=torch.optim.AdamW(bare.parameters(), 1e-4), config=config)
def step():
    engine.backward(engine(x).square().mean()); engine.step()
cpu, wall = map(reduce, timed(step))
engine.destroy(); del bare, engine, step
"""
LARGE = """
large = nn.Sequential(*[Block(1024) for _ in range(12)])
adamw = torch.optim.AdamW(large.parameters(), 1e-4)
"""
THERE = "%%distributed -s none --devices 4\nlarge, adamw"
SET_UP = "%%distributed -s {line} --devices 4\nlarge, adamw;"
BARE_FSDP = """%%distributed -s none --devices 4
from torch.distributed.fsdp import fully_shard
bare = copy.deepcopy(large)
barrier(); began = time.perf_counter()
for block in bare:
    fully_shard(block)
fully_shard(bare)
torch.optim.AdamW(bare.parameters(), 1e-4)
barrier(); took = time.perf_counter() - began
del bare
"""
BARE_ZERO = """%%distributed -s none --devices 4
import os; os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, logging; deepspeed.utils.logger.setLevel(logging.ERROR)
bare = copy.deepcopy(large)
barrier(); began = time.perf_counter()
config = dict(train_micro_batch_size_per_gpu=1, gradient_clipping=0.0, zero_allow_untested_optimizer=True,
              zero_force_ds_cpu_optimizer=False, zero_optimization=dict(stage={stage}))
engine, *_ = deepspeed.initialize(model=bare, optimizer=torch.optim.AdamW(bare.parameters(), 1e-4), config=config)
barrier(); took = time.perf_counter() - began
engine.destroy(); del bare, engine
"""
ROUNDS = 6


def main() -> None:
    table = Table("fsdp and DeepSpeed beside the bare libraries")
    pairs = [("fsdp", FSDP)]
    for stage in (1, 2, 3):
        extra = "dict(stage3_param_persistence_threshold=10_000)" if stage == 3 else "{}"  # as ours has it
        pairs.append((f"deepspeed --stage {stage}", ZERO.replace("{stage}", str(stage)).replace("{extra}", extra)))
    with kernel("%load_ext nbtrain", MODEL, STEP) as k:
        for line, bare in pairs:
            ratios, walls, theirs = [], [], []
            for _ in range(ROUNDS):
                read = []
                for cell in (OURS.format(line=line), bare, bare, OURS.format(line=line)):
                    run(k, cell)
                    read.append(run(k, say("[cpu, wall]")))
                ratios.append((read[0][0] + read[3][0]) / (read[1][0] + read[2][0]))
                walls.append((read[0][1] + read[3][1]) / (read[1][1] + read[2][1]))
                theirs += [read[1][0], read[2][0]]
            low, _, high = statistics.quantiles(ratios, n=4)
            control = (
                f"middle half {low:.3f} to {high:.3f}; wall {statistics.median(walls):.3f} ×; bare "
                f"{1e3 * statistics.median(theirs):.1f} ms a step and rank"
            )
            what = f"{line}: processor time of a step, 3.2 M numbers, 2 ranks"
            table.row(what, statistics.median(ratios), 1.03, "×", control)
    with kernel("%load_ext nbtrain", MODEL, LARGE) as k:
        for line, cell in [("fsdp", BARE_FSDP), *((f"deepspeed --stage {s}", BARE_ZERO) for s in (2, 3))]:
            set_up(table, k, line, cell.replace("{stage}", line[-1]))


def set_up(table: Table, k: Any, line: str, bare: str) -> None:
    """Taken in turns, too: memory that somebody has just given back is had sooner than other."""

    def ours() -> float:
        run(k, THERE)
        cell = SET_UP.format(line=line)
        return seconds(k, cell) - seconds(k, cell)

    def theirs() -> float:
        run(k, THERE)
        run(k, bare)
        return run(k, say("took"))

    ours(), theirs()  # they import what they need
    rounds = [(ours(), theirs(), theirs(), ours()) for _ in range(3)]
    ratios = [(a + d) / (b + c) for a, b, c, d in rounds]
    alone = [one for _, b, c, _ in rounds for one in (b, c)]
    control = f"bare {statistics.median(alone):.2f} s"
    table.row(f"{line}: setting 101 M numbers up on 4 ranks", statistics.median(ratios), 1.5, "×", control)


if __name__ == "__main__":
    main()
