"""What the first cell of a fresh kernel imports of nbtrain is counted: files, in the kernel and on a rank.

Whoever follows a cell may have to read any of them, and each is opened, read and run before the first step. What
another option, another strategy, a verb or an error needs is loaded when it is asked for. A bound only ever goes down.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nbtrain
from tests.support.kernels import running_kernel

KERNEL, RANK, TOGETHER = 180, 191, 271
"""files of nbtrain that the first cell under ddp imports; what both import counts once in `TOGETHER`. 238, 235 and 368
while a rank had every part that a cell may ask for, and the kernel every verb and report"""

NOTEBOOK = """
%load_ext nbtrain
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
net = nn.Linear(4, 2)
sgd = torch.optim.SGD(net.parameters(), 0.1)
batches = DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32).long()), 8)
"""
CELL = """%%distributed --strategy ddp --devices 2
for x, y in batches:
    nn.functional.cross_entropy(net(x), y).backward()
    sgd.step()
    sgd.zero_grad()
"""
IMPORTED = """
import json, sys
modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "nbtrain"]
print(json.dumps([module.__file__ for module in modules]))
"""


def test_files_that_the_first_cell_imports() -> None:
    with running_kernel() as kernel:
        told = [kernel.run(cell) for cell in (NOTEBOOK, CELL, IMPORTED, f"%%rank 0{IMPORTED}")]
    assert not any(one.error for one in told), "\n".join(one.text for one in told)
    place = Path(nbtrain.__file__).parent
    of_kernel, of_rank = (
        {str(Path(file).relative_to(place)) for file in json.loads(one.stdout.splitlines()[-1])} for one in told[2:]
    )
    together = of_kernel | of_rank
    counted = len(of_kernel), len(of_rank), len(together)
    if any(many > most for many, most in zip(counted, (KERNEL, RANK, TOGETHER), strict=True)):
        shown = (
            f"{'kernel' * (file in of_kernel):6} {'rank' * (file in of_rank):4} {file}" for file in sorted(together)
        )
        pytest.fail(f"{counted} files are more than {KERNEL, RANK, TOGETHER}:\n" + "\n".join(shown), pytrace=False)


def test_the_figure_that_the_architecture_has() -> None:
    told = (Path(nbtrain.__file__).parents[1] / "ARCHITECTURE.md").read_text()
    assert f"imports {TOGETHER} of nbtrain's files" in told
