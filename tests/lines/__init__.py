"""The lines that people write around a model, as cells: each is run on ranks and in one process.

    Line("what it is", cell, before=..., after=..., alone=..., refused=..., says=...)

`test_lines` runs every one of them under each strategy of its list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

START = """
import collections, contextlib, copy, dataclasses, itertools, os
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, IterableDataset
torch.manual_seed(0)
X = torch.randn(48, 6)
Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.last = nn.Linear(12, 2)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))
def fresh(seed=1):
    torch.manual_seed(seed)
    return Net()
def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
def batches(size=8, samples=48, **options):
    return DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=size, **options)
"""

NEW = """
model = fresh()
opt = sgd(model)
loader = batches(shuffle=True)
losses = []
result = {}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """What a user writes, and what is to come of it."""

    name: str
    cell: str
    before: str = ""
    """a cell of the notebook, after `model`, `opt`, `loader` (shuffled), `losses = []` and `result = {}` were made"""
    after: str = ""
    """a cell of the notebook, when the other one is through"""
    alone: str = ""
    """what one process runs in place of `cell`, where ranks are told apart in it"""
    refused: str = ""
    """the cell is refused on several ranks: what the error says"""
    says: str = ""
    """what is printed on several ranks"""
    without: dict[str, str] = field(default_factory=dict)
    """strategies under which it is refused, and what the error says"""
    flags: str = "--split-batches"
    tolerance: float = 1e-5
