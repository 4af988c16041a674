"""What a cell draws, with one process as the judge: in real kernels, under several strategies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough

START = """
import random, torch, torch.nn as nn, numpy as np
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(12))
def seeds(n=5):
    torch.manual_seed(n); np.random.seed(n + 1); random.seed(n + 2)
def order(loader):
    return [batch.tolist() for (batch,) in loader]
def stand():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate(), torch.initial_seed()
"""
RUNS = ("-s single", "-s ddp --devices 2", "-s none --devices 2")


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    yield Notebook(shared_kernel, first=START)
    shared_kernel.run("%distributed stop")


def test_initialisation_and_shuffling_equal_one_process(notebook: Notebook) -> None:
    for line in RUNS:
        notebook("seeds(); model = nn.Linear(3, 2); alone = model.weight.tolist(), np.random.rand(), random.random()")
        notebook("seeds(); shuffled = order(DataLoader(data, 3, shuffle=True)); after = stand()")
        notebook("seeds(); model = None")
        notebook(f"%%distributed {line}\nmodel = nn.Linear(3, 2); drawn = np.random.rand(), random.random()")
        assert notebook("(model.weight.tolist(), *drawn) == alone").value == "True", line
        notebook("seeds()")
        notebook(f"%%distributed {line}\nmine = order(DataLoader(data, 3, shuffle=True))")
        share = "shuffled[::2]" if "ddp" in line else "shuffled"
        assert notebook(f"mine == {share}, stand() == after").value == "(True, True)", line


def test_generators_held_in_names_keep_their_identity_and_come_home(notebook: Notebook) -> None:
    notebook(
        "g = torch.Generator().manual_seed(1); rng = np.random.default_rng(2); old = np.random.RandomState(3)\n"
        "box = {'rng': rng}; loader = DataLoader(data, 3, shuffle=True, generator=g)\n"
        "same = [id(g), id(rng), id(old)]\n"
        "py = random.Random(4)"
    )
    cell = "a = [torch.rand(2, generator=g).tolist(), rng.random(), old.normal(), box['rng'].random(), py.random()]"
    for line in RUNS[:2]:
        notebook("g.manual_seed(1); rng.bit_generator.state = np.random.default_rng(2).bit_generator.state")
        notebook("old.set_state(np.random.RandomState(3).get_state()); py.seed(4)")
        notebook(f"import copy\nfor _ in range(2):\n    {cell}\nalone = a, order(loader)")
        notebook("g.manual_seed(1); rng.bit_generator.state = np.random.default_rng(2).bit_generator.state")
        notebook("old.set_state(np.random.RandomState(3).get_state()); py.seed(4)")
        notebook(f"%%distributed {line}\n{cell}")
        notebook(f"%%distributed {line}\n{cell}")
        assert notebook("a == alone[0]").value == "True", line
        assert notebook("same == [id(g), id(rng), id(old)], box['rng'] is rng, loader.generator is g").value == (
            "(True, True, True)"
        )
        assert notebook("order(loader) == alone[1]").value == "True", "the notebook's loader goes on from there"


def test_failed_cell_leaves_the_notebook_s_streams_as_they_were(notebook: Notebook) -> None:
    notebook("seeds(); g = torch.Generator().manual_seed(1); before = stand(), g.get_state().tolist()")
    for line in RUNS:
        notebook.fails(
            f"%%distributed {line}\ntorch.rand(3); np.random.rand(); random.random(); g.manual_seed(9); 1 / 0"
        )
        assert notebook("(stand(), g.get_state().tolist()) == before").value == "True", line


@pytest.mark.thorough
def test_a_notebook_that_loads_numpy_or_torch_later_gives_all_ranks_the_same(kernel: Kernel) -> None:
    """What it has not loaded yet it cannot send; the first cell's ranks had drawn apart since."""
    notebook = Notebook(kernel, first="import sys\nassert 'torch' not in sys.modules")
    notebook("%%distributed -d 2\nimport pandas as pd")  # which loads numpy into the notebook, too
    notebook("assert 'numpy' in sys.modules and 'torch' not in sys.modules")
    for cell in ("x = 1", "import torch\ny = float(torch.rand(()))", "z = float(torch.rand(()))"):
        shown = notebook(f"%%distributed -d 2\n{cell}").text
        assert "differs" not in shown, shown
        assert "otherwise" not in shown, shown
    assert notebook("y != z").value == "True"
