"""A model is prepared wherever a name of the notebook holds it: also in what has no identity of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

START = """
import collections, functools, nbtrain
def fresh():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 0.01)
torch.manual_seed(0); inputs = torch.randn(64, 4); labels = (inputs[:, 0] > 0).long()
def loaded(size): return DataLoader(torch.utils.data.TensorDataset(inputs, labels), size)
loader = loaded(8)
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
def by_hand(model, loader):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad; p.grad = None
class Both:
    def __init__(self): self.model, self.optimizer = fresh()
    def fit(self, epochs):
        for _ in range(epochs): train(self.model, self.optimizer, loader)
Pair = collections.namedtuple("Pair", "model optimizer")
def alike(one, other): return all(torch.allclose(p, q, atol=1e-6) for p, q in zip(one.parameters(), other.parameters()))
expected, optimizer = fresh(); train(expected, optimizer, loaded(16))
written, _ = fresh(); by_hand(written, loaded(16))
"""
HELD = {
    "a tuple": ("held = fresh()", "train(held[0], held[1], loader)", "held[0]"),
    "a named tuple": ("held = Pair(*fresh())", "train(held.model, held.optimizer, loader)", "held.model"),
    "tuples in tuples": ("held = ((1, fresh()),)", "train(*held[0][1], loader)", "held[0][1][0]"),
    "a bound method": ("both = Both(); held = both.fit", "held(1)", "both.model"),
    "a partial of one": ("both = Both(); held = functools.partial(both.fit, 1)", "held()", "both.model"),
}


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(START)
    yield notebook
    notebook("%distributed stop")


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "deepspeed --stage 2"])
@pytest.mark.parametrize("held", HELD)
def test_a_model_in(notebook: Notebook, held: str, strategy: str) -> None:
    made, trained, model = HELD[held]
    notebook(made)
    notebook(f"%%distributed -d 2 -s {strategy} --monitor off\n{trained}", 120)
    assert notebook(f"alike({model}, expected)").value == "True"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_a_function_is_given_is_prepared(notebook: Notebook, strategy: str) -> None:
    usual = f"strategy={strategy!r}, devices=2"
    notebook(f"model, optimizer = fresh(); nbtrain.run(train, model, optimizer, loader, {usual})")
    assert notebook("alike(model, expected)").value == "True"
    notebook(f"both = Both(); nbtrain.run(both.fit, 1, {usual})")
    assert notebook("alike(both.model, expected)").value == "True"
    if strategy == "ddp":  # without an optimizer nothing would have said that it was not prepared
        notebook("model, _ = fresh(); nbtrain.run(by_hand, model, loader, devices=2)")
        assert notebook("alike(model, written)").value == "True"
