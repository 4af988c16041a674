"""Cells that read numbers out of a model in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

MODELS = """
import copy
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 6, 2, batch_first=True)
        self.deep = nn.Sequential(nn.GRU(6, 6, batch_first=True))
        self.head = nn.Linear(6, 2)
    def forward(self, x):
        return self.head(self.deep(self.rnn(x.view(-1, 2, 2))[0])[0][:, -1])
loader = DataLoader(data, batch_size=48)
"""

TRAIN = "for x, y in loader: F.cross_entropy({0}(x), y).backward(); {1}.step(); {1}.zero_grad()\n"

ALIKE = "print(all(torch.allclose(a, b, atol=1e-5) for a, b in zip({0}.parameters(), {1}.parameters())))"

LINE = "%%distributed -s fsdp --devices 2 --split-batches\n"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    made(MODELS)
    yield made
    made("%distributed stop")


@pytest.mark.thorough
def test_cells(notebook: Notebook) -> None:
    # Recurrent layers keep lists of their weights besides.
    notebook("model = Tagger(); first = copy.deepcopy(model); opt = adamw(model); opt1 = adamw(first)")
    for _ in range(2):
        notebook(LINE + TRAIN.format("model", "opt"))
        notebook(TRAIN.format("first", "opt1"))
        assert notebook(ALIKE.format("model", "first")).text.strip() == "True"
    lists = "[a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters())]"
    assert notebook(f"print(all({lists}), len({lists}))").text.split() == ["True", "8"]
    notebook(LINE.replace("fsdp", "ddp") + TRAIN.format("model", "opt"))
    notebook(TRAIN.format("first", "opt1"))
    assert notebook(ALIKE.format("model", "first")).text.strip() == "True"

    # Norms: shown, and assigned to names.
    squares = "sum(p.detach().pow(2).sum() for p in model.parameters())"
    turned = "turned = model.head.weight.detach().T; held = [n * 2]"
    wanted = notebook(f"print(f'{{{squares}:.3f}}')").text.strip()
    shown = notebook(LINE + f"n = {squares}; {turned}\nif rank == 0: mine = n.detach()\nprint(f'{{n:.3f}}')\nn").text
    for text in (wanted, f"tensor({wanted}"):
        assert text in shown
    check = f"abs(n - {squares}) < 1e-3, abs(held[0] - 2 * n) < 1e-3, torch.equal(turned, model.head.weight.T)"
    assert "False" not in notebook(f"print({check}, type(n) is torch.Tensor)").text

    # One rank alone is told so, also where torch itself moves something.
    for line in (f"print({squares})", "model.head.weight.norm().sqrt()"):
        error = notebook.fails(LINE + f"if rank == 0: {line}")
        assert "write `norm = p.norm()` on every rank" in error.evalue
        assert "rank 1 has come to the end" in error.evalue

    # A function that reads a name of the notebook.
    notebook("least = 1; larger = lambda module: sum(p.numel() for p in module.parameters()) > least")
    notebook(LINE.replace("\n", " --wrap larger\n") + TRAIN.format("model", "opt"))


@pytest.mark.thorough
def test_a_copy_that_takes_the_models_place_and_is_trained_by_hand(notebook: Notebook) -> None:
    # `scale` is whole on every rank; and the second cell has another layer than the copy was made with.
    begin = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.scale = nn.Linear(4, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(()))
    def forward(self, x): return self.head(torch.tanh(self.first(x)) * self.scale)
torch.manual_seed(0); {0} = Scaled(); loader = DataLoader(data, batch_size=48)
"""
    train = """
for x, y in loader:
    F.cross_entropy({0}(x), y).backward()
    with torch.no_grad():
        for p in {0}.parameters(): p -= 0.1 * p.grad
    {0}.zero_grad()
"""
    for name, line in (("model", LINE), ("first", "")):
        notebook(begin.format(name))
        notebook(line + f"{name} = copy.deepcopy({name})" + train.format(name))
        notebook(f"torch.manual_seed(1); {name}.head = nn.Linear(3, 2)")
        notebook(line + train.format(name))
    assert notebook(ALIKE.format("model", "first")).text.strip() == "True"
