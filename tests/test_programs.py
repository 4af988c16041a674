"""Ordinary training code runs unchanged but for the first line of the cells that train, and gives what one process gives.

Each file of tests/programs is a notebook in cells. It runs three times in a real kernel: plainly, under `single`
(equal to the last bit, random streams and identities included) and under `ddp` on two ranks that split each batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel, shared_kernel

HERE = Path(__file__).parent / "programs"
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py"))
SINGLE = "%%distributed --strategy single"
DDP = "%%distributed --strategy ddp --devices 2 --split-batches"


def cells(program: str) -> list[tuple[bool, str]]:
    """(whether it trains, its code) of every cell."""
    parts = (HERE / f"{program}.py").read_text().split("# %%")[1:]
    titled = [part.split("\n", 1) for part in parts]
    return [(title.strip() == "distributed", code.strip("\n")) for title, code in titled]


def run(kernel: Kernel, program: str, first_line: str = "") -> str:
    """All cells of the program; what was shown."""
    kernel.run("%reset -f")
    kernel.run("import torch, random, numpy as np; random.seed(0); np.random.seed(0); torch.manual_seed(0)")
    shown = ""
    for trains, code in cells(program):
        text = f"{first_line}\n{code}" if trains and first_line else code
        result = kernel.run(text)
        shown += result.text
        assert result.error is None, f"{text}\n{result.text}"
    kept = kernel.run(f"import tests.outcome; tests.outcome.outcomes[{first_line!r}] = tests.outcome.outcome(globals())")
    assert kept.error is None, kept.text
    return shown
