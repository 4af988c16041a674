"""Models in pieces between notebook and ranks: what changed comes home, and nothing else is gathered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbtrain.machine.registry import STRATEGIES
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(180)]
IN_PIECES = [name for name, entry in STRATEGIES.items() if entry.in_pieces and "cpu" in entry.needs.kinds]
GATHERED = {"zero1": 8}
"""Tensors that one step changes: four parameters and two of state for each. zero1 has parameters whole."""
START = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))
head = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
X, Y = torch.randn(64, 16), torch.randint(0, 4, (64,))
def step():
    F.cross_entropy(model(X), Y).backward(); optimizer.step(); optimizer.zero_grad()
def told():
    state = [t for s in optimizer.state.values() for t in s.values()]
    return [t.double().sum().item() for t in (*model.parameters(), *state)]
"""


@pytest.fixture
def book(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    made("%load_ext nbtrain")
    made(START)
    yield made
    made("%distributed stop")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", IN_PIECES)
def test_only_what_changed_is_gathered(book: Notebook, strategy: str) -> None:
    cell = f"%%distributed -s {strategy} --devices 2\n"
    book(
        f"{cell}from nbtrain.worker.home.pieces import Pieces\nPieces.plain = Pieces._fetch; gathered = []\n"
        "def fetch(self, apart):\n    gathered.append(tuple(apart.shape)); return Pieces.plain(self, apart)\n"
        "Pieces._fetch = fetch"
    )
    book(f"{cell}step()")
    book(f"{cell}first = len(gathered); gathered.clear()")
    book(f"assert first == {GATHERED.get(strategy, 12)}, first")
    book(f"{cell}with torch.no_grad(): score = model(X).sum().item()")
    book(f"{cell}second = len(gathered); step()")
    book("assert second == 0, second")
    book(f"{cell}third = len(gathered); Pieces._fetch = Pieces.plain")
    book(f"assert third == {GATHERED.get(strategy, 12)}, third")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", IN_PIECES)
def test_what_the_notebook_changes_goes_into_the_pieces(book: Notebook, strategy: str) -> None:
    cell = f"%%distributed -s {strategy} --devices 2\nstep()"
    alone = "%%distributed -s single --devices 1\nstep()"
    edits = [
        "with torch.no_grad(): model[0].weight.mul_(0.5)",
        "optimizer.state[model[2].weight]['exp_avg'].zero_()",
        "model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})",
        "optimizer.param_groups[0]['lr'] = 0.003",
        "model[2].bias.requires_grad_(False)",
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
    ]
    found = []
    for body in (cell, alone):
        book(START)
        book(body)
        for edit in edits:
            book(edit)
            book(body + ("\nschedule.step()" if "schedule" in edit else ""))
        found.append(book("print(told())").stdout)
    one, other = (eval(text) for text in found)
    assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.sample(first=2)
@pytest.mark.parametrize("strategy", IN_PIECES)
def test_what_is_kept_is_put_together_for_another_strategy(book: Notebook, strategy: str) -> None:
    book("def two(): return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))")
    book("def more(model, adam): F.cross_entropy(model(X), Y).backward(); adam.step(); adam.zero_grad()")
    book(
        f"%%distributed -s {strategy} --devices 2 --keep big,adam\ntorch.manual_seed(3)\n"
        "big = two()\nadam = torch.optim.Adam(big.parameters(), 1e-2)\nmore(big, adam)"
    )
    book("%%distributed -s ddp --devices 2\nmore(big, adam)")
    book("torch.manual_seed(3); own = two(); alone = torch.optim.Adam(own.parameters(), 1e-2)")
    book("more(own, alone); more(own, alone)")
    book("assert torch.allclose(big.pull()[0].weight, own[0].weight, atol=1e-5)")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", IN_PIECES)
def test_no_other_strategy_drops_what_was_kept_of_the_notebooks(book: Notebook, strategy: str) -> None:
    book(f"%%distributed -s {strategy} --devices 2 --keep model,optimizer\nstep()")
    refused = book.kernel.run("%%distributed -s ddp --devices 2\nstep()").text
    assert refused.startswith("UsageError: model, optimizer: what --keep has left on the ranks"), refused
    book(f"%%distributed -s {strategy} --devices 2\nstep()")
    mixed = eval(book("print(told())").stdout)
    book(START)
    book("for _ in range(2): step()")
    assert mixed == pytest.approx(eval(book("print(told())").stdout), abs=1e-4)
