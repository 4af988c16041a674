"""A rank's debugger in JupyterLab: its prompt is the notebook's own input line, beside the dashboard."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.lab import Notebook

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

STOPS = """%%distributed --devices 2
x = rank + 40
if rank == 1: breakpoint()
total = reduce(x)
1 / (total - total)"""


EMPTY = "(document.querySelector('.jp-Stdin-input')?.value ?? '') === ''"
"""the line was taken: there is no input line, or the next one"""


def typed(book: Notebook, *lines: str) -> None:
    for line in lines:
        box = book.page.locator(".jp-Stdin-input").last
        box.wait_for(timeout=30_000)
        box.fill(line)
        box.press("Enter")
        book.page.wait_for_function(EMPTY, timeout=5_000)


def test_a_breakpoint_and_a_post_mortem(notebook: Callable[..., Notebook]) -> None:
    book = notebook("%load_ext nbtrain", STOPS, "%debug", "%%distributed --devices 2\nprint('again')")
    book.run(0)
    book.start(1)
    typed(book, "p x", "n")
    assert "(Pdb, rank 1)" in book.page.locator(".jp-Stdin-prompt").last.inner_text()
    typed(book, "c")
    book.wait(1)
    shown = "".join(out.get("text", "") for out in book.outputs(1))
    assert "41\n" in shown
    assert "-> total = reduce(x)" in shown
    assert book.outputs(1)[-1]["ename"] == "ZeroDivisionError"
    book.start(2)
    typed(book, "p total", "q")
    book.wait(2)
    assert "40.5\n" in "".join(out.get("text", "") for out in book.outputs(2))
    assert "again\n" in "".join(out.get("text", "") for out in book.run(3))
    assert book.page.locator(".jp-Stdin-input").count() == 0
