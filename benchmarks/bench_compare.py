"""What comparing strategies costs besides the steps that are compared.

python -m benchmarks.bench_compare
"""

from __future__ import annotations

import re
import time

from benchmarks.measure import Table, kernel, run, seconds
from tests.support.kernels import Kernel

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
wide = 512
model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, wide), nn.ReLU()) for _ in range(4)), nn.Linear(wide, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(3200, wide), torch.randint(10, (3200,))), batch_size=16, shuffle=True)
"""
LOOP = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
"""
STEPS = 10
WARM = 2
BATCH = 32
"""of both ranks"""
TIMES = 5


def main() -> None:
    table = Table("Three strategies for ten steps on a warm pool (2 ranks, CPU)")
    with kernel("%load_ext nbtrain", SETUP, f"%%distributed -d 2\n{LOOP}") as one:
        cell = seconds(one, f"%%distributed -d 2\n{LOOP}")
        for names in ("ddp,zero1,sharded", "ddp,fsdp,deepspeed_stage_2"):
            run(one, f"%%distributed -d 2 --compare {names} --steps 1\n{LOOP}")  # libraries are loaded
            found = [compared(one, names) for _ in range(TIMES)]
            besides = sorted(whole - steps for whole, steps in found)[TIMES // 2]
            steps = sorted(steps for _, steps in found)[TIMES // 2]
            control = f"the steps themselves {steps:.2g} s; the whole loop as a cell {cell:.2g} s"
            table.row(f"--compare {names}, besides the steps", besides, 2, "s", control)


def compared(one: Kernel, names: str) -> tuple[float, float]:
    """Seconds of all of it, and of the steps."""
    began = time.perf_counter()
    text = one.run(f"%%distributed -d 2 --compare {names} --steps {STEPS}\n{LOOP}").text
    whole = time.perf_counter() - began
    paces = [float(pace.replace(",", "")) for pace in re.findall(r"B  +([\d,.]+) +16$", text, re.MULTILINE)]
    assert len(paces) == 3, text
    return whole, sum((WARM + STEPS) * BATCH / pace for pace in paces)


if __name__ == "__main__":
    main()
