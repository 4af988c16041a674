"""The model that tests train, its data and its loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.spare = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        if spare:
            h = h + self.spare(h)
        return self.last(h) * self.scale


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], epochs: int = 2) -> None:
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def samples_of(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )
