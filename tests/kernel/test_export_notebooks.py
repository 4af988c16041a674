"""`%distributed export` of each distributed cell of the notebooks: the scripts run, and train what the notebook has
trained. What is no script, or trains otherwise, is in the table, with why.

`make verify` exports every cell, and runs half of the scripts of each notebook, which SEED draws; `make parity`
(PARITY=all) runs all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.kernels import ROOT, running_kernel
from tests.support.torchrun import torchrun
from tests.support.variants import EVERYTHING, SEED

pytestmark = [pytest.mark.kernel, pytest.mark.ranks, pytest.mark.thorough, pytest.mark.limit(900)]

RUNS, ENDLESS, FAILS, OTHERWISE = "it runs", "it would not end", "it fails as the cell does", "it trains otherwise"
WEIGHTS = """get_ipython() and __import__("torch").save(
    {name: one.state_dict() for name, one in list(globals().items()) if isinstance(one, __import__("torch").nn.Module)},
    %r)"""
ROUNDING = 0.05
"""Adam divides the gradient of a bias that changes nothing, which is rounding, by itself"""

TABLE: dict[str, dict[int, str]] = {
    "01_first_run": {8: OTHERWISE, 15: OTHERWISE},  # dropout; what was trained before is not in the script
    "02_one_namespace": {
        14: OTHERWISE, 18: OTHERWISE, 21: FAILS, 30: "`first = share[0].item()` needs nbtrain",  # by hand, before it
    },
    "03_fsdp_and_deepspeed": {
        25: "export has no line for --checkpoint-activations", 31: "needs nbtrain", 37: "needs nbtrain",
    },
    "04_all_strategies": {20: "--strategy pipeline has no plain form"},
    "05_watch": {18: ENDLESS, 30: OTHERWISE, 33: ENDLESS},
    "07_trainer": {15: "needs nbtrain: a script takes Lightning's own strategy='ddp'"},
    "when_it_goes_wrong": {7: ENDLESS, 11: FAILS, 17: FAILS, 21: ENDLESS},
}  # fmt: skip
"""Notebook → cell of it → what comes of it; of those that are not named the script trains what the notebook has. Not
here is 06_choose: its cells are trials, of which nothing comes home."""


def drawn(notebook: str) -> set[int]:
    """The cells whose scripts are run."""
    wanted = TABLE[notebook]
    distributed = [number for number, cell in cells(notebook) if cell.startswith("%%distributed")]
    scripts = [one for one in distributed if wanted.get(one, RUNS) in (RUNS, FAILS, OTHERWISE)]
    half = len(scripts) if EVERYTHING else -(-len(scripts) // 2)
    return set(random.Random(f"{SEED} {notebook}").sample(scripts, half))


def cells(notebook: str) -> Iterator[tuple[int, str]]:
    content = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            yield number, "".join(cell["source"])


@pytest.mark.parametrize("notebook", TABLE)
def test_the_distributed_cells_of_a_notebook(notebook: str, tmp_path: Path) -> None:
    left, played = dict(TABLE[notebook]), drawn(notebook)
    with running_kernel() as kernel:
        for number, cell in cells(notebook):
            kernel.run(cell.replace(" --background", "") if "100_000" not in cell else cell, 300)
            if not cell.startswith("%%distributed"):
                continue
            folder = tmp_path / str(number)
            folder.mkdir()
            said = kernel.run(f"%distributed export {folder}/train.py").text
            wanted = left.pop(number, RUNS)
            if wanted not in (RUNS, ENDLESS, FAILS, OTHERWISE):
                assert wanted in said, (number, said)
                continue
            assert f"written: {folder}/train.py" in said, (number, said)
            if number not in played:
                continue
            if wanted == FAILS:
                with pytest.raises(AssertionError):
                    torchrun(folder, "train.py")
                continue
            torchrun(folder, "train.py")
            if wanted == RUNS:
                assert kernel.run(WEIGHTS % str(folder / "notebook.pt")).error is None
                here, there = (torch.load(folder / name) for name in ("notebook.pt", "trained.pt"))
                assert there or "backward" not in cell, number
                for name, weights in there.items():
                    far = max((weights[key] - here[name][key]).abs().max().item() for key in weights)
                    assert far < ROUNDING, (number, name, far)
    assert not left, "of these there is no such cell"
