"""Cells of a notebook and of its ranks in turn, as one text.

play(notebook, '''
n = 1
--- ranks
n += 1
--- here
assert n == 2''')
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel, Result
from tests.support.notebook import Notebook

_CUT = re.compile(r"^--- (here|ranks)$", re.MULTILINE)


def play(notebook: Notebook, story: str, devices: int = 2, options: str = "") -> Result:
    """Run them all; none may raise. What the last one has shown is returned. `options`: in the place of `devices`."""
    text = textwrap.dedent(story)
    pieces, typed = ["here", *_CUT.split(text)], options or f"--devices {devices}"
    result = Result()
    for where, cell in zip(pieces[::2], pieces[1::2], strict=True):
        cell = cell.strip("\n")
        if cell:
            result = notebook(f"%%distributed {typed}\n{cell}" if where == "ranks" else cell)
    return result


@pytest.fixture(scope="module")
def warm_ranks(module_kernel: Kernel) -> Iterator[None]:
    """Two ranks that all tests of a module share; they are there before the first test, so they are no leak of it."""
    assert module_kernel.run("%load_ext nbtrain").error is None
    assert module_kernel.run("%%distributed --devices 2\npass").error is None
    yield
    assert module_kernel.run("%distributed stop").error is None


@pytest.fixture
def notebook(shared_kernel: Kernel, warm_ranks: None) -> Notebook:
    """An empty notebook before ranks that earlier tests have used."""
    return Notebook(shared_kernel, "")
