"""A model that is made without memory comes home with its weights."""

from __future__ import annotations

import os
import random
import re
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.kernels import Kernel

SETUP = """
import torch, nbtrain
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.scale = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Parameter(torch.ones(16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head, self.frozen = nn.Linear(16, 40), nn.Linear(16, 16).requires_grad_(False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.frozen(self.layer(self.norm(self.emb(x) * self.scale))))

torch.manual_seed(1)
with nbtrain.empty():
    model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
held, x = list(model.parameters()), torch.arange(40).view(4, 10)
"""

TRAIN = "for i in range(3): model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"

LOOK = """
own = list(model.parameters())
print(all(map(lambda p, q: p is q, own, held)), len(optimizer.state), {p.device.type for p in own})
print(["%.9f" % float(p.detach().double().abs().sum()) for p in own] if not own[-1].is_meta else "")
"""


def on_two() -> list[str]:
    """`make verify` plays three strategies, which SEED draws; `make parity` (PARITY=all) all that can be had here."""
    found = [
        name
        for name, entry in registry.STRATEGIES.items()
        if name not in ("single", "none") and all(find_spec(package) for package in entry.needs.packages)
    ]
    everything = os.environ.get("PARITY") == "all"
    return found if everything else random.Random(os.environ.get("SEED", "0")).sample(found, min(3, len(found)))


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", on_two())
def test_a_model_comes_home_with_its_weights(shared_kernel: Kernel, strategy: str) -> None:
    kernel = shared_kernel

    def train(line: str) -> str:
        kernel.run(SETUP)
        before = kernel.run(LOOK).stdout
        assert before.startswith("True 0")
        assert "meta" in before
        assert kernel.run(f"%%distributed {line}\n{TRAIN}").error is None
        return kernel.run(LOOK).stdout

    kernel.run("%load_ext nbtrain")
    many = train(f"-s {strategy} -d 2 --checkpoint-activations TransformerEncoderLayer")
    assert many.startswith("True 17 {'cpu'}")
    kernel.run(SETUP)
    assert kernel.run(f"%%distributed -s {strategy} -d 2\n{TRAIN}1/0").error is not None
    assert "meta" in kernel.run(LOOK).stdout  # the notebook is as before
    kernel.run(f"%%distributed -s {strategy} -d 2\n{TRAIN}")
    assert numbers(kernel.run(LOOK).stdout) == pytest.approx(numbers(many), rel=1e-5)
    one = train("-s single -d 1")
    kernel.run("%distributed stop")
    assert numbers(one) == pytest.approx(numbers(many), rel=1e-5)


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"'([\d.]+)'", text)]
