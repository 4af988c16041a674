"""The core runs cells where the annexes have been left out of the installation, and says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import ROOT, running_kernel
from tests.support.notebook import Notebook

CORE = ("tests/unit/base", "tests/unit/compat", "tests/unit/engines", "tests/unit/exchange", "tests/unit/machine",
        "tests/unit/strategies", "tests/unit/watch", "tests/unit/worker")  # fmt: skip
TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), 4)
"""
LOOP = """%%distributed {options}
for (x,) in data:
    model(x).square().mean().backward(); opt.step(); opt.zero_grad()
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A folder with nbtrain, but for its annexes."""
    without = shutil.ignore_patterns("annexes", "__pycache__")
    shutil.copytree(ROOT / "nbtrain", tmp_path / "nbtrain", ignore=without)
    return tmp_path


@pytest.fixture
def notebook(core: Path) -> Iterator[Notebook]:
    with running_kernel(PYTHONPATH=str(core)) as kernel:
        yield Notebook(kernel)


def test_a_cell_trains_and_an_annex_is_named(notebook: Notebook, core: Path) -> None:
    assert str(core) in notebook("import nbtrain; print(nbtrain.__file__)").stdout
    notebook(TRAIN)
    for options in ("--devices 2", "-s fsdp --devices 2"):
        notebook(LOOP.format(options=options))
    assert "nbtrain.annexes.planning, which was left out" in notebook.fails("%distributed plan").evalue
    assert "nbtrain.annexes.planning" in notebook.fails(LOOP.format(options="--compare ddp,fsdp --devices 2")).evalue
    assert "nbtrain.annexes.frameworks" in notebook.fails("nbtrain.run(print)").evalue
    assert (
        "nbtrain.annexes.machines" in notebook.fails(LOOP.format(options="--engine ssh --hosts a,b --devices 2")).evalue
    )
    assert "nbtrain.annexes.machines" in notebook.fails("%distributed join --slurm job.sbatch --nodes 2").evalue
    assert "nbtrain.annexes.export" in notebook.fails("%distributed export train.py").evalue


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_the_tests_of_the_core_pass(core: Path) -> None:
    shutil.copytree(ROOT / "tests", core / "tests", ignore=shutil.ignore_patterns("annexes", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", core)
    for name in ("js", ".ci", "jupyter-config"):
        (core / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:nbval", *CORE]
    own = {**os.environ, "PYTHONPATH": str(core)}
    done = subprocess.run(command, cwd=core, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
