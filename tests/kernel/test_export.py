"""`%distributed export`: the script runs under torchrun without nbtrain, and trains the notebook's weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook
from tests.support.torchrun import alike, run, torchrun

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

CELLS = (
    """import os, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset""",
    "torch.manual_seed(0)\nX = torch.randn(52, 4); Y = (X[:, 0] > 0).long()\nX.shape",
    "class Block(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(8, 8)\n"
    "    def forward(self, x): return x + torch.tanh(self.l(x))",
    "def make():\n    return nn.Sequential(nn.Linear(4, 8), Block(), nn.Linear(8, 2))\nunused = 3\n%pwd",
    """model = make()
opt = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
data = DataLoader(TensorDataset(X, Y), 8, shuffle=True)
valid = DataLoader(TensorDataset(X, Y), 8)""",
    "weight = torch.ones(3); weight[1] = 5.0",
    """def evaluate():
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in valid)
    model.train()
    return right / len(valid.dataset)""",
)
LOOP = """
for epoch in range(2):
    for x, y in data:
        loss = F.cross_entropy(model(x), y) * weight[1] / 5
        opt.zero_grad(); loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    schedule.step()
    accuracy = evaluate()
    log(accuracy=accuracy)
    print("accuracy", round(accuracy, 4), world_size)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        kernel.run("%load_ext nbtrain")
        yield kernel


FORGET = """typed = get_ipython().history_manager.input_hist_raw
typed[:] = [""] * len(typed); del typed"""
"""a script has all cells before it: each test's has its own"""


@pytest.fixture
def notebook(kernel: Kernel, tmp_path: Path) -> Iterator[Notebook]:
    """Its numbers are those of one process that begins now."""
    made = Notebook(kernel, "")
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    kernel.run(FORGET)
    for cell in CELLS:
        assert kernel.run(cell, 120).error is None
    yield made
    made("%distributed stop")


@pytest.mark.sample("ddp")
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp", "fsdp --wrap Block", "ddp --precision bf16-mixed", "ddp --no-sampler", "ddp --split-batches",
        "zero1 --comm-dtype fp16 --bucket-mb 1", "fsdp --sharding HYBRID_SHARD --replicas 2 --comm-dtype bf16",
    ],
)  # fmt: skip
def test_the_script_trains_what_the_notebook_has_trained(notebook: Notebook, tmp_path: Path, strategy: str) -> None:
    notebook(f"%%distributed -s {strategy} -d 2\n{LOOP}", 120)
    said = notebook("%distributed export train.py").text
    assert "torchrun --nproc-per-node 2 train.py" in said
    text = (tmp_path / "train.py").read_text()
    assert "unused" not in text
    assert "import nbtrain" not in text
    shown = torchrun(tmp_path, "train.py")
    assert shown.count("accuracy 0.") == 4, "of one process"
    if "fsdp" not in strategy and "bf16" not in strategy:
        here, there = re.findall(r"the norm of its weights is (\S+); in the notebook it was (\S+)", shown)[0]
        assert float(here) == pytest.approx(float(there), rel=1e-4)
    assert alike(notebook, tmp_path, 2e-3 if "bf16-mixed" in strategy else 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["--stage 3", "--stage 2 --precision bf16-mixed"])
def test_deepspeed(notebook: Notebook, tmp_path: Path, options: str) -> None:
    notebook(f"%%distributed -s deepspeed -d 2 {options}\n{LOOP}", 300)
    notebook("%distributed export train.py")
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path, 2e-3 if "bf16" in options else 2e-6)


def test_clipping_that_an_engine_cannot_do_is_refused(notebook: Notebook) -> None:
    loop = LOOP.replace("nn.utils.clip_grad_norm_(", "norm = nn.utils.clip_grad_norm_(")
    notebook(f"%%distributed -s deepspeed -d 2\n{loop}", 300)
    said = notebook.kernel.run("%distributed export train.py").text
    assert "DeepSpeed's engine clips by the norm of all gradients" in said


@pytest.mark.thorough
def test_complete_tensors_need_no_block_where_every_process_has_them(notebook: Notebook, tmp_path: Path) -> None:
    loop = f"{LOOP}\nwith whole(model), torch.no_grad(): model[0].bias.clamp_(min=0.1)\n"
    notebook(f"%%distributed -s ddp -d 2\n{loop}", 120)
    notebook("%distributed export train.py")
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path)
    notebook(f"%%distributed -s fsdp -d 2\n{loop}", 120)
    assert "needs nbtrain" in notebook.kernel.run("%distributed export train.py").text


@pytest.mark.thorough
def test_a_model_that_the_cell_makes_itself(notebook: Notebook, tmp_path: Path) -> None:
    made = (
        "def fresh():\n    torch.manual_seed(1); net = make()\n    return net, torch.optim.SGD(net.parameters(), 0.1)\n"
    )
    loop = "for x, y in data:\n    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()"
    notebook(made)
    notebook(f"%%distributed -s fsdp -d 2\nmodel, opt = fresh()  # anew\n{loop}", 120)
    notebook("%distributed export train.py")
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path)


RESUMED = """
best, seen, losses = 0.0, 0, []
for epoch in range(4):
    for x, y in data:
        loss = F.cross_entropy(F.dropout(model(x), 0.1), y)
        opt.zero_grad(); loss.backward(); opt.step()
        seen += len(x)
        losses.append(loss.item())
    schedule.step()
    best = max(best, evaluate())
    print("epoch", epoch, seen, len(losses), f"{best:.6f}")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["single -d 1", "ddp -d 2", "zero1 -d 2", "fsdp -d 2"])
def test_a_run_that_was_cut_short_goes_on_as_if_it_had_not_been(
    notebook: Notebook, tmp_path: Path, options: str
) -> None:
    notebook(f"%%distributed -s {options}\n{RESUMED}", 300)
    notebook("%distributed export --resume train.py")
    ranks = 1 if "single" in options else 2
    shown = torchrun(tmp_path, "train.py", ranks)
    uninterrupted = torch.load(tmp_path / "trained.pt")["model"]
    text, saved = (tmp_path / "train.py").read_text(), "        if number <= done:\n"
    assert saved in text
    (tmp_path / "cut.py").write_text(text.replace(saved, f"        if number == 3: _gathered(0), os._exit(0)\n{saved}"))
    torchrun(tmp_path, "cut.py", ranks)
    last = [line for line in shown.splitlines() if line.startswith("epoch")][2:]
    again = torchrun(tmp_path, "train.py", ranks, "--resume", "train_last.pt")
    assert [line for line in again.splitlines() if line.startswith("epoch")] == last
    resumed = torch.load(tmp_path / "trained.pt")["model"]
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in resumed)


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        (
            "for x, y in data:\n    opt.zero_grad(); model(x).sum().backward(); opt.step()",
            "one outermost loop over epochs",
        ),
        (2 * "for epoch in range(1):\n    model(X).sum().backward(); opt.step()\n", "one outermost loop over epochs"),
    ],
)
def test_a_cell_that_cannot_go_on_says_so(notebook: Notebook, tmp_path: Path, cell: str, wanted: str) -> None:
    notebook(f"%%distributed -s ddp -d 2\n{cell}", 120)
    said = notebook("%distributed export --resume train.py").text
    assert "the script has no --resume: " in said
    assert wanted in said
    assert "--resume" not in (tmp_path / "train.py").read_text()


@pytest.mark.thorough
def test_one_process_and_other_numbers_of_them(notebook: Notebook, tmp_path: Path) -> None:
    notebook(f"%%distributed -s single -d 1\n{LOOP}", 120)
    assert "Run it with: python train.py" in notebook("%distributed export train.py").text
    run(tmp_path, sys.executable, "train.py")
    assert alike(notebook, tmp_path)
    with pytest.raises(AssertionError, match="one process trains this model"):
        torchrun(tmp_path, "train.py", 3)
    notebook(f"%%distributed -s ddp -d 2\n{LOOP}", 120)
    notebook("%distributed export several.py")
    torchrun(tmp_path, "several.py", 3)


@pytest.mark.thorough
def test_what_only_history_has_is_saved_and_said(notebook: Notebook, tmp_path: Path) -> None:
    notebook("%%distributed -d 2 --monitor off\nmade_on_ranks = torch.arange(3.0)")
    notebook("del weight; weight = torch.ones(3); weight.mul_(2)\nweight = weight + made_on_ranks")
    notebook(f"%%distributed -s ddp -d 2\n{LOOP}", 60)
    said = notebook("%distributed export train.py").text
    assert "made_on_ranks is saved beside the script: no cell that was run makes it" in said
    assert (tmp_path / "train_objects.pt").is_file()
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path)


@pytest.mark.thorough
def test_a_cell_by_its_number_and_failed_cells(notebook: Notebook, tmp_path: Path) -> None:
    notebook("%%distributed -d 2 --monitor off\nopt.zero_grad(); F.cross_entropy(model(X), Y).backward(); opt.step()")
    notebook.fails("weight = 1 / 0")
    notebook(f"%%distributed -s ddp -d 2\n{LOOP}", 60)
    said = notebook("%distributed export last.py").text
    found = re.search(r"also trained or made besides what the script uses: model in cell \[(\d+)\]", said)
    assert found is not None, said
    number = found[1]
    assert "1 / 0" not in (tmp_path / "last.py").read_text()
    notebook(f"%distributed export --cell {number} first.py")
    text = (tmp_path / "first.py").read_text()
    assert "F.cross_entropy(model(X), Y).backward()" in text
    assert "def evaluate" not in text
    torchrun(tmp_path, "first.py")


@pytest.mark.thorough
def test_a_notebook_and_a_file_for_slurm(notebook: Notebook, tmp_path: Path) -> None:
    notebook(f"%%distributed -s ddp -d 2\n{LOOP}", 60)
    notebook("%distributed export --notebook clean.ipynb")
    cells = ["".join(one["source"]) for one in json.loads((tmp_path / "clean.ipynb").read_text())["cells"]]
    assert cells[0] == "%load_ext nbtrain"
    assert cells[-1].startswith("%%distributed -s ddp -d 2")
    with running_kernel() as other:
        for cell in cells:
            assert other.run(cell, 120).error is None
        here = eval(notebook("[p.sum().item() for p in model.parameters()]").value or "")
        assert eval(other.run("[p.sum().item() for p in model.parameters()]").value or "") == pytest.approx(
            here, abs=1e-5
        )
    notebook("%distributed export --slurm train.py")
    batch = (tmp_path / "train.sbatch").read_text()
    assert batch.startswith("#!/bin/bash\n#SBATCH --job-name=train")
    assert "srun torchrun --standalone --nproc-per-node 2 train.py" in batch


EPOCHS = """
def run_epoch(loader, train):
    model.train(train)
    right = 0
    with torch.set_grad_enabled(train):
        for x, y in loader:
            out = model(x)
            right += (out.argmax(1) == y).sum().item()
            if train:
                opt.zero_grad(); F.cross_entropy(out, y).backward(); opt.step()
    return right
"""


@pytest.mark.thorough
def test_a_function_that_trains_and_evaluates(notebook: Notebook, tmp_path: Path) -> None:
    """Of the loop that evaluates every process has all, as on the ranks."""
    notebook(EPOCHS)
    cell = "for epoch in range(2):\n    run_epoch(data, True)\n    print('right', run_epoch(valid, False))"
    here = notebook(f"%%distributed -s ddp -d 2 --monitor off\n{cell}", 120).text
    notebook("%distributed export train.py")
    there = torchrun(tmp_path, "train.py")
    assert re.findall(r"right \d+", there) == list(dict.fromkeys(re.findall(r"right \d+", here)))
    assert alike(notebook, tmp_path)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("export", "export takes the name of a file"),
        ("export a.py b.py", "export takes the name of a file"),
        ("export --cell x a.py", "--cell x: the number of a cell"),
        ("export --cell 99999 a.py", "there is no In[99999]"),
        ("export --all a.py", "export has no option --all"),
    ],
)
def test_what_is_no_export(notebook: Notebook, line: str, wanted: str) -> None:
    notebook("%%distributed -s ddp -d 2 --monitor off\nmodel, opt;")
    assert wanted in notebook.kernel.run(f"%distributed {line}").text


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-s pipeline -d 2", "--strategy pipeline has no plain form"),
        ("-s ddp -d 2 --accumulate 2", "write (loss / 2).backward(), and step every 2 batches"),
        ("-s none -d 2", "the cell is written for torchrun already"),
        ("-s ddp -d 2 --precision bf16-true", "--precision bf16-true"),
    ],
)
def test_what_has_no_plain_form_is_said(notebook: Notebook, line: str, wanted: str) -> None:
    notebook.kernel.run(f"%%distributed {line} --monitor off\nmodel, opt;", 60)
    assert wanted in notebook.kernel.run("%distributed export train.py").text


@pytest.mark.thorough
def test_methods_of_a_model_have_their_gradients_averaged(notebook: Notebook, tmp_path: Path) -> None:
    notebook(
        "class Coder(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(4, 8)\n"
        "        self.b = nn.Linear(8, 2)\n    def encode(self, x): return torch.tanh(self.a(x))\n"
        "    def decode(self, z): return self.b(z)\n    def forward(self, x): return self.decode(self.encode(x))"
    )
    notebook("torch.manual_seed(1); model = Coder()\nopt = torch.optim.SGD(model.parameters(), 0.1)")
    loop = "for x, y in data:\n    loss = F.cross_entropy(model.decode(model.encode(x)), y)\n"
    notebook(f"%%distributed -s ddp -d 2\n{loop}    opt.zero_grad(); loss.backward(); opt.step()")
    notebook("%distributed export train.py")
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path)
    parts = loop.replace("model.decode(model.encode(x))", "model.b(model.encode(x))")
    notebook(f"%%distributed -s ddp -d 2\n{parts}    opt.zero_grad(); loss.backward(); opt.step()")
    assert "`model.b(…)` calls a part of a model" in notebook.kernel.run("%distributed export other.py").text


TWO_EPOCHS = """for epoch in range(2):
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
"""
SGD = "opt = torch.optim.SGD(model.parameters(), 0.1)"
LIKE_THE_NOTEBOOK = {
    "a copy of the model": (
        "ddp", "import copy; torch.manual_seed(0); model = make()\n" + SGD,
        TWO_EPOCHS + "half = copy.deepcopy(model)\nwith torch.no_grad():\n"
        "    for p in half.parameters(): p.mul_(0.5)\nhalf(X).sum().backward()\n"
        "with torch.no_grad(): model[0].bias += half[0].bias.grad\n"),
    "a model in eval mode that trains": ("ddp", "_ = model.eval()", TWO_EPOCHS),
    "counts that are summed up": (
        "ddp", "right = 0",
        TWO_EPOCHS + "with torch.no_grad():\n    for x, y in valid: right += len(x)\n"
        "right = reduce(right, 'sum')\nwith torch.no_grad(): model[0].bias += right / 520\n"),
    "an attribute that forward reads": (
        "ddp",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(4, 2); self.by = 0.0\n"
        f"    def forward(self, x): return self.l(x) * self.by\ntorch.manual_seed(0); model = Net(); {SGD}",
        TWO_EPOCHS.replace("    for x", "    model.by = 1.0 + epoch\n    for x", 1),
    ),
    "a schedule of the same statement": (
        "zero1",
        f"def fresh():\n    model = make(); {SGD}\n"
        "    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 1, 0.1)\n"
        "torch.manual_seed(0); model, opt, falling = fresh()", TWO_EPOCHS + "    falling.step()\n"),
    "weights that are read before the cell": (
        "fsdp",
        f"torch.manual_seed(0); model = make(); {SGD}\n"
        "first = {n: w + 0.1 for n, w in model.state_dict().items()}\nmodel.load_state_dict(first)", TWO_EPOCHS),
    "an evaluation of one process": (
        "ddp",
        f"torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), "
        f"nn.Linear(8, 2))\n{SGD}",
        TWO_EPOCHS + "    if rank == 0:\n        with torch.no_grad(): model(X)\n"),
    "a sampler that deals batches out itself": (
        "ddp", "from torch.utils.data.distributed import DistributedSampler",
        "part = DistributedSampler(data.dataset, world_size, rank)\nmine = DataLoader(data.dataset, 8, sampler=part)\n"
        + TWO_EPOCHS.replace("    for x, y in data", "    part.set_epoch(epoch)\n    for x, y in mine")),
    "a seed in the cell": ("ddp", "pass", f"torch.manual_seed(7)\n{TWO_EPOCHS}"),
    "a sampler that draws by itself": (
        "ddp",
        "import random\nclass Mixed:\n    def __len__(self): return 52\n"
        "    def __iter__(self): return iter(random.sample(range(52), 52))\n"
        "random.seed(1); data = DataLoader(data.dataset, 8, sampler=Mixed())", TWO_EPOCHS),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("case", LIKE_THE_NOTEBOOK)
def test_the_script_is_like_the_notebook_with(notebook: Notebook, tmp_path: Path, case: str) -> None:
    strategy, cell, loop = LIKE_THE_NOTEBOOK[case]
    notebook("torch.manual_seed(0); model = make(); opt = torch.optim.SGD(model.parameters(), 0.1)")
    notebook(cell)
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off\n{loop}", 60)
    notebook("%distributed export train.py")
    torchrun(tmp_path, "train.py")
    assert alike(notebook, tmp_path)


AUGMENTED = """import random, numpy as np
def numbers(): return [random.random(), np.random.rand(), torch.rand(()).item()]
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return len(X)
    def __getitem__(self, at): return X[at], Y[at], torch.tensor(numbers())
random.seed(1); np.random.seed(1)
noisy = DataLoader(Noisy(), 8, shuffle=True)"""
DRAWS = """before = numbers()
seen = []
for x, y, drawn in noisy:
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    seen += drawn.tolist()
print("before", [round(one, 6) for one in before], len({tuple(one) for one in gather(before)}))
print("seen", *(len({one[at] for part in gather(seen) for one in part}) for at in range(3)))
"""


@pytest.mark.thorough
def test_processes_draw_numbers_of_their_own_from_the_first_batch_on(notebook: Notebook, tmp_path: Path) -> None:
    """And the same before it: as ranks do, whose number is `random`'s, numpy's and torch's."""
    notebook(AUGMENTED)
    here = notebook(f"%%distributed -s ddp -d 2 --monitor off\n{DRAWS}", 60).text
    notebook("%distributed export train.py")
    there = torchrun(tmp_path, "train.py")
    found = re.findall(r"(?:before \[|seen \d).*", there)
    assert found == re.findall(r"(?:before \[|seen \d).*", here)
    assert found[0].endswith("] 1")
    assert found[1] == "seen 52 52 52"
    assert alike(notebook, tmp_path)


@pytest.mark.thorough
def test_processes_that_train_different_weights_are_found(notebook: Notebook, tmp_path: Path) -> None:
    """Here: a part is frozen when the model is wrapped, and trained later."""
    notebook(f"torch.manual_seed(0); model = make(); model[0].requires_grad_(False)\n{SGD}")
    loop = TWO_EPOCHS.replace("    for x", "    if epoch: model[0].requires_grad_(True)\n    for x", 1)
    notebook(f"%%distributed -s ddp -d 2 --monitor off\n{loop}")
    notebook("%distributed export train.py")
    with pytest.raises(AssertionError, match="processes have trained different weights"):
        torchrun(tmp_path, "train.py")


LEARNER = """class Learner:
    def __init__(self): self.model = make(); self.opt = torch.optim.SGD(self.model.parameters(), 0.1)
    def fit(self):
        for x, y in data: self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
learner = Learner()"""
STREAM = """class Rows(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(zip(X, Y))
data = DataLoader(Rows(), 8)"""
NO_SCRIPT = {
    "a model without a name": ("ddp", LEARNER, "learner.fit()", "prepares the models that are names of the notebook"),
    "one that is made in a loop": (
        "ddp", "", f"for fold in range(2):\n    model = make(); {SGD}\n    model(X).sum().backward(); opt.step()",
        "the cell makes model in a `for`"),
    "a loose parameter": (
        "ddp", "t = torch.zeros((), requires_grad=True); opt = torch.optim.SGD([*model.parameters(), t], 0.1)",
        TWO_EPOCHS.replace("model(x)", "model(x) * t.exp()"), "opt trains parameters that are in no model"),
    "gradients by name": (
        "ddp", "", "g = torch.autograd.grad(model(X).sum(), model.parameters())", "autograd.grad gives is one process"),
    "a stream": ("ddp", STREAM, TWO_EPOCHS, "data is a stream"),
    "pieces": ("fsdp", "", TWO_EPOCHS + "best = model.state_dict()", "under fsdp state_dict() has the pieces"),
}  # fmt: skip


@pytest.mark.sample("a model without a name", "pieces")
@pytest.mark.parametrize("case", NO_SCRIPT)
def test_what_a_script_would_train_otherwise_is_refused(notebook: Notebook, tmp_path: Path, case: str) -> None:
    strategy, cell, loop, wanted = NO_SCRIPT[case]
    notebook(cell or "pass")
    notebook.kernel.run(f"%%distributed -s {strategy} -d 2 --monitor off\n{loop}", 60)
    assert wanted in notebook.kernel.run("%distributed export train.py").text
    assert not (tmp_path / "train.py").exists()


# --- what earlier cells have changed, drawn and saved is in the script as in the notebook --------------------------

SMALL = (
    "import os, torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    "from torch.utils.data import DataLoader, TensorDataset",
    "torch.manual_seed(0)\nX = torch.randn(48, 4); Y = (X[:, 0] > 0).long()",
    "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))",
    "model = make()\nopt = torch.optim.SGD(model.parameters(), 0.1)",
    "data = DataLoader(TensorDataset(X, Y), 8, shuffle=True)",
)
SMALL_LOOP = """%%distributed -s ddp -d 2 --monitor off
for epoch in range(2):
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.fixture
def small(kernel: Kernel, tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    made(f"import os; os.chdir({str(tmp_path)!r})")
    made(FORGET)
    for cell in SMALL:
        made(cell)
    yield made
    made("%distributed stop")


def exported(small: Notebook, folder: Path) -> str:
    """What export says of a script that trains the weights which the notebook has."""
    small(SMALL_LOOP, 120)
    said = small("%distributed export train.py").text
    torchrun(folder, "train.py")
    assert alike(small, folder)
    return said


@pytest.mark.thorough
def test_what_earlier_cells_have_changed(small: Notebook, tmp_path: Path) -> None:
    for cell in (
        "%%time\ntorch.manual_seed(3)\nhead = nn.Linear(8, 2)\nmodel = nn.Sequential(nn.Linear(4, 8), head)",
        "%%capture out\nopt = torch.optim.SGD(model.parameters(), 0.1)",
        "%time data = DataLoader(TensorDataset(X, Y), 8)",
        "def freeze():\n    for p in head.parameters(): p.requires_grad_(False)", "freeze()", "X *= 3.0",
    ):  # fmt: skip
        small(cell)
    exported(small, tmp_path)


@pytest.mark.thorough
def test_objects_of_the_notebooks_own_classes_are_read(small: Notebook, tmp_path: Path) -> None:
    small("exec('scale = torch.full((1,), 3.0)')")
    small("X = X * scale\ndata = DataLoader(TensorDataset(X, Y), 8)")
    small("class Base: pass\nclass Config(Base):\n    rate = 0.3")
    small("exec('config = Config(); config.rate = 0.4')")
    small("model = make(); opt = torch.optim.SGD(model.parameters(), config.rate)")
    small("torch.manual_seed(5)\nmodel = make(); opt = torch.optim.SGD(model.parameters(), config.rate)")
    assert "config is saved beside the script: no cell that was run makes it" in exported(small, tmp_path)


@pytest.mark.thorough
def test_weights_of_today_are_not_saved(small: Notebook, tmp_path: Path) -> None:
    cell = "other = make(); opt = torch.optim.SGD(other.parameters(), 0.1)"
    small(f"%%distributed -s ddp -d 2 --monitor off\n{cell}")
    small(SMALL_LOOP.replace("model", "other"), 120)
    said = small.kernel.run("%distributed export train.py").text
    assert "other is needed, no cell that was run makes it, and its Sequential is not saved" in said
    assert not list(tmp_path.glob("train*"))


@pytest.mark.sample("train.py")
@pytest.mark.parametrize("there", ["train.py", "train.sbatch"])
def test_all_files_are_looked_for_before_any_is_written(small: Notebook, tmp_path: Path, there: str) -> None:
    small("%%distributed -s ddp -d 2 --monitor off\nmodel, opt;")
    (tmp_path / there).write_text("mine")
    said = small.kernel.run("%distributed export --slurm train.py").text
    assert f"{there} is there already: another name, or --force" in said
    assert [one.name for one in tmp_path.glob("train*")] == [there]
    assert (tmp_path / there).read_text() == "mine"
    small("%distributed export --slurm train.py --force")
    assert (tmp_path / there).read_text() != "mine"
