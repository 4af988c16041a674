"""The cells of each page of the documentation, pasted in order into one fresh notebook.

They run as they stand, and show what the page says. tests/support/pages.py has what the languages of blocks mean.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, Result, running_kernel
from tests.support.libraries import kernel_with
from tests.support.pages import PAGES, ROOT, blocks, lines_not_shown, name_of

README = ROOT / "README.md"
PLAYED = [page for page in PAGES if page != README and any(block.is_cell for block in blocks(page))]
LIBRARIES = {"docs/asks.md": "hugging_face", "docs/hugging_face.md": "hugging_face"}
"""page → what its reader has installed beside the tests' own environment"""


@contextmanager
def reader_of(page: Path, folder: Path) -> Iterator[Kernel]:
    """A notebook that keeps its history, as a reader's does."""
    history = {"NBTRAIN_HISTORY": str(folder / "history")}
    if library := LIBRARIES.get(name_of(page)):
        with kernel_with(library, **history, HF_HUB_OFFLINE="1") as kernel:
            yield kernel
    else:
        with running_kernel(**history) as kernel:
            yield kernel


def paste(page: Path, kernel: Kernel) -> Result:
    """All cells of a page; what the last one has shown. One may raise if its output has the error."""
    shown = Result()
    for cell, below in zip(found := blocks(page), [*found[1:], None], strict=True):
        if not cell.is_cell:
            continue
        shown = kernel.run(cell.text, timeout=120)
        told = below.text if below and below.language == "output" else ""
        missing = lines_not_shown(told, shown.text)
        assert not missing, f"{cell.text}\ndoes not show:\n{os.linesep.join(missing)}\n\nbut:\n{shown.text}"
        assert shown.error is None or shown.error.ename in told, f"{cell.text}\n{shown.text}"
    return shown


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("page", PLAYED, ids=name_of)
def test_the_cells_run_as_they_stand_and_show_what_the_page_says(page: Path, tmp_path: Path) -> None:
    with reader_of(page, tmp_path) as kernel:
        paste(page, kernel)


def test_the_readme_trains(tmp_path: Path) -> None:
    with reader_of(README, tmp_path) as kernel:
        shown = paste(README, kernel)
        seen = kernel.run("len(losses), sum(losses[:10]), sum(losses[-10:])")
        right = kernel.run("(model(points).argmax(1) == labels).float().mean().item()")
    assert [block.is_cell for block in blocks(README)].count(True) == 3
    text = shown.text.removeprefix("starting 2 ranks …\n")  # where that takes longer than two seconds
    assert text.startswith("ddp · 2 ranks"), shown.text
    count, first, last = ast.literal_eval(seen.value or "")
    assert count == 5 * 32_768 // 64 // 2
    assert last < 0.5 * first
    said = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", shown.stdout, re.MULTILINE)]
    assert len(said) == 5
    assert min(said[1:]) < said[0], said  # each is of one batch
    assert float(right.value or 0) > 0.9, right.text
