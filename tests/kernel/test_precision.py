"""Precision from a cell, on ranks and inside the kernel."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel

SETUP = """
%load_ext nbtrain
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.randn(16, 8), torch.randint(4, (16,))
weight, seen, losses = model[0].weight, set(), []
"""

LOOP = """
for _ in range(4):
    inner = model[0](data[0])
    seen |= {str(inner.dtype), str(model[0].weight.dtype)}
    loss = F.cross_entropy(model(data[0]), data[1])
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
"""


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_from_a_cell(shared_kernel: Kernel, strategy: str, devices: int) -> None:
    run = shared_kernel.run
    assert run(SETUP).error is None
    shown = run(f"%%distributed -s {strategy} -d {devices} --precision bf16 --monitor text\n{LOOP}")
    assert shown.error is None, shown.text
    assert f"{strategy} · {devices} rank{'s' * (devices > 1)} · cpu · bf16-mixed" in shown.text
    assert run("assert seen == {'torch.float32'} and weight is model[0].weight and len(losses) == 4").error is None
    # Another precision: the ranks' weights in 16 bits, the notebook's not, and what it changes itself arrives.
    for _ in range(2):
        assert run("seen.clear()\nwith torch.no_grad(): model[2].bias.fill_(0.5)").error is None
        shown = run(
            f"%%distributed -s {strategy} -d {devices} --precision bf16-true\nfirst = model[2].bias.clone()\n{LOOP}"
        )
        assert shown.error is None, shown.text
    shown = run(
        "assert seen == {'torch.float32', 'torch.bfloat16'} and weight is model[0].weight\n"
        "state = optimizer.state[weight]\n"
        "assert weight.dtype == state['exp_avg'].dtype == torch.float32 and state['step'] == 12\n"
        "assert torch.equal(weight, weight.bfloat16().float()) and first.tolist() == [0.5] * 4\n"
        "assert losses[-1] < losses[0] and len(losses) == 12\n"
        "%distributed stop"
    )
    assert shown.error is None, shown.text


def test_inside_the_kernel(shared_kernel: Kernel) -> None:
    run = shared_kernel.run
    run(SETUP)
    for precision in ("16-mixed", "16-true"):
        shown = run(f"%%distributed --engine inprocess --precision {precision}\n{LOOP}")
        assert f"single · in the kernel · cpu · {precision}" in shown.text
        assert shown.error is None, shown.text
    assert run("assert seen == {'torch.float32', 'torch.float16'} and weight.dtype == torch.float32").error is None
    assert run("%distributed stop").error is None
