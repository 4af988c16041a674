"""Which loops of a cell know their place although nobody has written `resumable`."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from nbtrain.annexes.detached.plain_loops import with_resumable
from nbtrain.notebook.cell import Cell

NAMES = {"loader": DataLoader([1, 2]), "some": range(3), "words": ["a"], "count": 3}
STEP = "loss(x).backward()"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"for x in loader: {STEP}", f"for x in resumable(loader): {STEP}"),
        (f"for é in range(3):\n    for x in loader: {STEP}",
         f"for é in resumable(range(3)):\n    for x in loader: {STEP}"),
        (f"for e in range(\n  count,\n): {STEP}", f"for e in resumable(range(\n  count,\n)): {STEP}"),
        (f"for e in some: {STEP}\nfor x in loader: {STEP}",
         f"for e in resumable(some): {STEP}\nfor x in resumable(loader): {STEP}"),
        ("for x in loader: print(x)", ""),
        (f"for x in words: {STEP}", ""),
        (f"for x in iter(loader): {STEP}", ""),
        (f"for e in resumable(range(3)): {STEP}\nfor x in loader: {STEP}", ""),
        (f"if True:\n    for x in loader: {STEP}", ""),
        (f"def train():\n    for x in loader: {STEP}", ""),
    ],
)  # fmt: skip
def test_plain_loops_that_train(before: str, after: str) -> None:
    cell = Cell(source=before, code="\n\n" + before, filename="<cell>", first_line=3, number=1)
    assert with_resumable(cell, NAMES).code == "\n\n" + (after or before)


def test_a_name_of_the_users_is_his() -> None:
    cell = Cell(source="", code=f"for e in range(3): {STEP}", filename="<cell>", first_line=1, number=1)
    assert with_resumable(cell, {"range": list, **NAMES}) is not None
    assert with_resumable(cell, {"range": list, **NAMES}).code == cell.code
    assert with_resumable(cell, {"resumable": list}) is cell
