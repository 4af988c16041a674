"""DeepSpeed in a test: a model with all that makes it hard, its batches and its weights. A file that imports this
imports DeepSpeed before its first test (`deepspeed_here`), as ranks are forks of its process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.absent import absent

mse = nn.functional.mse_loss
Batches = list[tuple[torch.Tensor, torch.Tensor]]
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""stage 3 cuts everything, however small"""


@pytest.fixture(autouse=True, scope="module")
def deepspeed_here() -> None:
    """Once, here: the ranks are forks of this process."""
    if find_spec("deepspeed") is None:
        absent("DeepSpeed is not installed", "pip install deepspeed")
    from nbtrain.strategies.deepspeed.library import imported

    imported(torch.device("cpu"))


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a parameter of its own, methods that run layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.emb(x).mean(1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden * self.scale + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encode(x))  # type: ignore[no-any-return]

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.forward(x), y) + (self.encode(x) - self.encode(x[:, 1:])).pow(2).mean()


def make() -> tuple[Tied, torch.optim.AdamW, CosineAnnealingLR]:
    torch.manual_seed(0)
    model = Tied()
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 1e-2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.99))
    return model, optimizer, CosineAnnealingLR(optimizer, 20)


def batches(count: int, start: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randint(0, 12, (8, 4), generator=generator), torch.randn(8, 12, generator=generator))
        for _ in range(start + count)
    ]
    return made[start:]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)
