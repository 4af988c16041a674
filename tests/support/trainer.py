"""A module, its data, and what they come to in one process: for the tests of `nbtrain.Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.kernels import Kernel, running_kernel

START = """
%load_ext nbtrain
import os, time, torch, nbtrain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from nbtrain.trainer.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

class Net(nbtrain.Module):
    def __init__(self, rate=0.2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen = []
    def forward(self, x):
        return self.layers(x)
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.seen.append(batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return {"index": batch_idx, "out": self(batch[0])}
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.make, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)
    def losses(self, x, which):
        if which == 0:
            return F.softplus(-self.judge(self.make(x))).mean()
        return F.softplus(self.judge(self.make(x).detach())).mean() + F.softplus(-self.judge(x)).mean()
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.make, self.judge)]

torch.manual_seed(0)
X = torch.randn(64, 4); Y = (X[:, 0] > 0).long()
data = DataLoader(TensorDataset(X, Y), 8)
held_out = DataLoader(TensorDataset(X[:30], Y[:30]), 8)

def trainer(**given):
    usual = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=ROOT)
    return nbtrain.Trainer(**{**usual, **given})

def one_process(epochs, net=None, step=None, size=16):
    "The loop that a user would have written, on batches of two ranks' samples."
    net = net or Net()
    (optimizer,), (scheduler,) = Net.configure_optimizers(net)
    for _ in range(epochs):
        for at in range(0, len(X), size):
            optimizer.zero_grad()
            (step or F.cross_entropy)(net.layers(X[at:at + size]), Y[at:at + size]).backward()
            optimizer.step()
        scheduler.step()
    return net

def pair_alone():
    alone = Pair(); steps = alone.configure_optimizers()
    for at in range(0, 64, 16):
        for which, optimizer in enumerate(steps):
            optimizer.zero_grad(); alone.losses(X[at:at + 16], which).backward(); optimizer.step()
    return alone

def alike(a, b):
    return all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a.parameters(), b.parameters()))
"""


@contextmanager
def trained(folders: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which START was run; `ROOT` is a folder for what trainers write."""
    with running_kernel(NBTRAIN_HISTORY=str(folders.mktemp("history"))) as kernel:
        kernel.run(f"ROOT = {str(folders.mktemp('trainer'))!r}")
        assert kernel.run(START, 120).error is None
        yield kernel
