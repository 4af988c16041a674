"""`%distributed export`: what earlier cells have changed, drawn and saved is in the script as in the notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook
from tests.support.torchrun import alike, torchrun

pytestmark = [pytest.mark.kernel, pytest.mark.ranks, pytest.mark.thorough]

CELLS = (
    "import os, copy, random, torch\nimport numpy as np\nfrom torch import nn\nimport torch.nn.functional as F\n"
    "from torch.utils.data import DataLoader, Subset, TensorDataset",
    "torch.manual_seed(0)\nX = torch.randn(48, 4); Y = (X[:, 0] > 0).long()",
    "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))",
    "model = make()\nopt = torch.optim.SGD(model.parameters(), 0.1)",
    "data = DataLoader(TensorDataset(X, Y), 8, shuffle=True)",
)
LOOP = """%%distributed -s ddp -d 2 --monitor off
for epoch in range(2):
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        kernel.run("%load_ext nbtrain")
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel, tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    made(f"import os; os.chdir({str(tmp_path)!r})")
    for cell in CELLS:
        made(cell)
    yield made
    made("%distributed stop")


def exported(notebook: Notebook, folder: Path) -> str:
    """What export says of a script that trains the weights which the notebook has."""
    notebook(LOOP, 120)
    said = notebook("%distributed export train.py").text
    torchrun(folder, "train.py")
    assert alike(notebook, folder)
    return said


@pytest.mark.parametrize(
    "cells",
    [
        ["for p in model[0].parameters():\n    p.requires_grad = False",
         "for g in opt.param_groups:\n    g['lr'] = 0.5",
         "state = {name: one * 2 for name, one in model.state_dict().items()}", "print(model.load_state_dict(state))"],
        ["%%time\ntorch.manual_seed(3)\nhead = nn.Linear(8, 2)\nmodel = nn.Sequential(nn.Linear(4, 8), head)",
         "%%capture out\nopt = torch.optim.SGD(model.parameters(), 0.1)",
         "%time data = DataLoader(TensorDataset(X, Y), 8)",
         "def freeze():\n    for p in head.parameters(): p.requires_grad_(False)", "freeze()", "X *= 3.0"],
    ],
    ids=["the same names", "other names"],
)  # fmt: skip
def test_what_earlier_cells_have_changed(notebook: Notebook, tmp_path: Path, cells: list[str]) -> None:
    for cell in cells:
        notebook(cell)
    exported(notebook, tmp_path)


def test_numbers_of_each_library_are_saved_where_it_has_no_seed(notebook: Notebook, tmp_path: Path) -> None:
    for cell in (
        "torch.manual_seed(0); random.seed(0)\nA = np.random.randn(48, 4)\nX = torch.tensor(A).float() + 1",
        "A *= 2\nlabel = random.choice([0, 1]); Y = (X[:, label] > 1).long()\norder = list(range(48))",
        "def mixed(xs):\n    np.random.shuffle(xs)\n    return len(xs)",
        "n = mixed(order)\ndata = DataLoader(Subset(TensorDataset(X, Y), order), 8)",
        "model = make()\nopt = torch.optim.SGD(model.parameters(), 0.1)",
    ):
        notebook(cell)
    said = exported(notebook, tmp_path)
    for name in ("X", "order"):
        assert f"{name} is saved beside the script: cell [" in said
    assert "label" not in said


def test_files_that_cells_have_written_stay_as_they_are(notebook: Notebook, tmp_path: Path) -> None:
    notebook("for e in range(1):\n    opt.step()\n    torch.save(model.state_dict(), 'best.pt')")
    notebook("with open('notes.txt', 'w') as f:\n    f.write(str(model.train()))")
    notebook("torch.save(model, 'model.pt'); np.save('x.npy', X)")
    files = [tmp_path / name for name in ("best.pt", "notes.txt", "model.pt", "x.npy")]
    for one in files:
        one.write_text("mine")
    exported(notebook, tmp_path)
    assert {one.read_text() for one in files} == {"mine"}


def test_objects_of_the_notebooks_own_classes_are_read(notebook: Notebook, tmp_path: Path) -> None:
    notebook("exec('scale = torch.full((1,), 3.0)')")
    notebook("X = X * scale\ndata = DataLoader(TensorDataset(X, Y), 8)")
    notebook("class Base: pass\nclass Config(Base):\n    rate = 0.3")
    notebook("exec('config = Config(); config.rate = 0.4')")
    notebook("model = make(); opt = torch.optim.SGD(model.parameters(), config.rate)")
    notebook("torch.manual_seed(5)\nmodel = make(); opt = torch.optim.SGD(model.parameters(), config.rate)")
    assert "config is saved beside the script: no cell that was run makes it" in exported(notebook, tmp_path)


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("exec('model = make(); opt = torch.optim.SGD(model.parameters(), 0.1)')",
         "model is needed, no cell that was run makes it, and its Sequential is not saved"),
        ("exec('model, opt = [make()] * 2')", "its Sequential is not saved, as it would be with the weights of today"),
    ],
)  # fmt: skip
def test_weights_of_today_are_not_saved(notebook: Notebook, tmp_path: Path, cell: str, wanted: str) -> None:
    notebook(f"del model, opt\n{cell}")
    notebook(LOOP if "SGD" in cell else "%%distributed -d 2 --monitor off\nmodel, opt;")
    assert wanted in notebook.kernel.run("%distributed export train.py").text
    assert not list(tmp_path.glob("train*"))


@pytest.mark.parametrize("there", ["train.py", "train.sbatch"])
def test_all_files_are_looked_for_before_any_is_written(notebook: Notebook, tmp_path: Path, there: str) -> None:
    notebook("%%distributed -s ddp -d 2 --monitor off\nmodel, opt;")
    (tmp_path / there).write_text("mine")
    said = notebook.kernel.run("%distributed export --slurm train.py").text
    assert f"{there} is there already: another name, or --force" in said
    assert [one.name for one in tmp_path.glob("train*")] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_model_that_is_made_anew_is_prepared_and_the_first_one_left_out(notebook: Notebook, tmp_path: Path) -> None:
    notebook("def fresh():\n    torch.manual_seed(0); m = make(); return m, torch.optim.SGD(m.parameters(), 0.1)")
    for _ in range(2):
        notebook("model, opt = fresh()")
        exported(notebook, tmp_path)
        text = (tmp_path / "train.py").read_text()
        assert text.count("model, opt = fresh()\nmodel = prepared(model)\n") == 1
        assert text.count("= fresh()") == 1
        (tmp_path / "train.py").unlink()


def test_a_model_that_is_changed_and_made_anew_is_prepared_last(notebook: Notebook, tmp_path: Path) -> None:
    """The first one is needed, as the second is made of it."""
    notebook("torch.manual_seed(0); model = make(); opt = torch.optim.SGD(model.parameters(), 0.1)")
    notebook("model = copy.deepcopy(model); opt = torch.optim.SGD(model.parameters(), 0.1)")
    exported(notebook, tmp_path)
