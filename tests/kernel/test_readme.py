"""The three cells of README.md, pasted in order into a fresh notebook."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.kernels import Kernel

README = Path(__file__).resolve().parents[2] / "README.md"
CELLS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_cells_run_as_they_stand_and_the_loss_falls(kernel: Kernel) -> None:
    assert len(CELLS) == 3
    assert CELLS[2].startswith("%%distributed --devices 2\n")
    for cell in CELLS:
        shown = kernel.run(cell)
        assert shown.error is None, f"{cell}\n{shown.text}"
    assert shown.text.startswith("ddp · 2 ranks"), shown.text
    losses = ast.literal_eval(kernel.run("losses").value or "")
    assert len(losses) == 5 * 4096 // 64 // 2
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10]), losses
    said = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", shown.stdout, re.MULTILINE)]
    assert len(said) == 5
    assert said[-1] < said[0], said
    right = kernel.run("(model(points).argmax(1) == labels).float().mean().item()")
    assert float(right.value or 0) > 0.9, right.text
