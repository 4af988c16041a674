"""The CUDA paths, where there is a card: `make gpu`."""

from __future__ import annotations

import pytest

from nbtrain.machine import gpus
from tests.support.kernels import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

SETUP = """
%load_ext nbtrain
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X, Y = torch.randn(256, 16), torch.randint(0, 4, (256,))
def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)
model, optimizer = make()
loader = DataLoader(TensorDataset(X, Y), batch_size=32)
losses = []
"""
LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
"""
COMPARE = """
alone, opt = make()
for _ in range(2):
    for x, y in loader:
        F.cross_entropy(alone(x), y).backward(); opt.step(); opt.zero_grad()
print(max((p - q).abs().max().item() for p, q in zip(alone.parameters(), model.parameters())) < 1e-4)
print(next(model.parameters()).device.type, torch.cuda.is_initialized(), len(losses))
"""


def _train(kernel: Kernel, line: str) -> str:
    assert kernel.run(SETUP).error is None
    for _ in range(2):
        result = kernel.run(line + LOOP, timeout=110)
        assert result.error is None, result.error
    return kernel.run(COMPARE).stdout


def test_one_rank_on_a_card(kernel: Kernel) -> None:
    """The model comes home to the CPU, and the notebook itself never wakes CUDA."""
    assert _train(kernel, "%%distributed --devices 1 --accelerator cuda").split() == ["True", "cpu", "False", "16"]


def test_two_ranks_share_a_card_over_gloo(kernel: Kernel) -> None:
    line = "%%distributed --devices 2 --accelerator cuda --oversubscribe --split-batches"
    assert _train(kernel, line).split() == ["True", "cpu", "False", "16"]


@pytest.mark.skipif(len(gpus.gpus()) < 2, reason="NCCL takes one rank a card, and there are fewer than two cards")
def test_a_rank_on_each_card_over_nccl(kernel: Kernel) -> None:
    assert _train(kernel, "%%distributed --devices 2 --split-batches").split() == ["True", "cpu", "False", "16"]
    assert "nccl" in kernel.run("%distributed status").stdout


def test_a_model_that_is_on_the_card_stays_there(kernel: Kernel) -> None:
    assert kernel.run(SETUP + "model.cuda(); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)").error is None
    result = kernel.run("%%distributed --devices 1 --accelerator cuda" + LOOP, timeout=110)
    assert result.error is None, result.error
    assert kernel.run("print(next(model.parameters()).device)").stdout.strip() == "cuda:0"


def test_memory_of_the_card_is_read_without_waking_it(kernel: Kernel) -> None:
    (card, *_) = gpus.gpus()
    assert 0 < card.used < card.total
    assert kernel.run("%load_ext nbtrain\n%distributed doctor").stdout.count(card.name) >= 1


def test_more_ranks_than_cards_names_the_way_out(kernel: Kernel) -> None:
    assert kernel.run("%load_ext nbtrain").error is None
    result = kernel.run("%%distributed --devices 99\npass")
    assert "--oversubscribe" in (result.stderr + result.stdout + str(result.error))
