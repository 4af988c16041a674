"""Cells of a notebook under fsdp, one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

LOADER = "loader = DataLoader(data, batch_size=16)"

ALONE = """
ref = copy.deepcopy(first); opt1 = adamw(ref)
average = copy.deepcopy(ref)
for i in range(2):
    for x, y in loader:
        F.cross_entropy(ref(x), y).backward()
        nn.utils.clip_grad_norm_(ref.parameters(), 0.5)
        opt1.step(); opt1.zero_grad()
        if i:
            with torch.no_grad():
                for a, b in zip(average.parameters(), ref.parameters()): a.lerp_(b, 0.1)
    if i == 0: average = copy.deepcopy(ref)
"""

CELL = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(params, 0.5)
    opt.step(); opt.zero_grad()
"""

AVERAGED = (
    CELL
    + """
    with torch.no_grad():
        for a, b in zip(ema.parameters(), params): a.lerp_(b, 0.1)
"""
)

CLOSE = "print(all(torch.allclose(a, b, atol=1e-5) for a, b in zip({}.parameters(), {}.parameters())))"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


@pytest.mark.thorough
def test_cells_of_a_notebook(notebook: Notebook) -> None:
    """Names of parameters taken in another cell; an average copied in a cell; more that joins; weights in a file."""
    notebook(f"import copy; {LOADER}")
    notebook("model = net(); first = copy.deepcopy(model); opt = adamw(model); params = list(model.parameters())")
    line = "%%distributed -s fsdp --devices 2 --split-batches\n"
    notebook(line + CELL)
    notebook(line + "ema = copy.deepcopy(model)" + AVERAGED)
    notebook(ALONE)
    assert notebook(CLOSE.format("model", "ref")).text.strip() == "True"
    assert notebook(CLOSE.format("ema", "average")).text.strip() == "True"
    assert notebook("print(type(ema) is type(model), type(params[0]).__name__)").text.split() == ["True", "Parameter"]
    notebook("small = nn.Linear\ndef large(module): return isinstance(module, small)")
    notebook(line.replace("\n", " --wrap large\n") + "with torch.no_grad(): ema(X)" + CELL)
    notebook("head = nn.Linear(2, 2); more = torch.optim.SGD([*head.parameters(), *model[0].parameters()], lr=0.1)")
    notebook(line + "for x, y in loader: F.cross_entropy(head(model(x)), y).backward(); more.step(); more.zero_grad()")
    notebook(line + CELL + "torch.save(model.state_dict(), 'w.pt')")
    notebook("kept = torch.load('w.pt'); import os; os.unlink('w.pt')")
    # Different paths are different files, each whole; and each rank finds its own at once.
    each = "torch.save(model.state_dict(), f'w{rank}.pt'); found = torch.load(f'w{rank}.pt')"
    notebook(line + each + "\nassert len(found) == len(model.state_dict())")
    notebook("each = [torch.load(f'w{i}.pt') for i in range(2)]; os.unlink('w0.pt'); os.unlink('w1.pt')")
    same_ones = "print(all(torch.equal(v, one[k]) for one in each for k, v in model.state_dict().items()))"
    assert notebook(same_ones).text.strip() == "True"
    same_ones = "print(all(torch.equal(v, kept[k]) for k, v in model.state_dict().items()))"
    assert notebook(same_ones).text.strip() == "True"
