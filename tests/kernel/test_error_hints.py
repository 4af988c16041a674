"""A name that the notebook has and a rank does not find: the error says what to write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    yield Notebook(shared_kernel, first="")
    shared_kernel.run("%distributed stop")


def test_names_in_strings(notebook: Notebook) -> None:
    notebook("x = 4; y = {'x': 1}\nimport pandas as pd; frame = pd.DataFrame({'a': [1, 2, 9]})")
    said = "Write its name in the cell, a line with nothing but\n    x\n"
    for line, name in (
        ("eval('x + 1')", "NameError"),
        ("globals()['x']", "KeyError"),
        ("import sys; getattr(sys.modules['__main__'], 'x')", "AttributeError"),
        ("frame.query('a < @x')", "NameError"),
        ("def f():\n    return eval('x')\nf()", "NameError"),
    ):
        error = notebook.fails(f"%%distributed --devices 2\n{line}")
        assert name in error.ename or error.ename == "UndefinedVariableError", error.ename
        assert said in error.traceback, line
    assert "is 5\n" in notebook("%%distributed --devices 2\nx\nprint('is', eval('x + 1'))").stdout
    assert "is 2\n" in notebook("%%distributed --devices 2\nx\nprint('is', len(frame.query('a < @x')))").stdout
    # what the notebook has not, what is another dict's, and what the cell itself deleted
    for line in ("eval('nobody')", "{}['x']", "del y['x']; y['x']", "del x\neval('x')"):
        assert "The notebook has" not in notebook.fails(f"%%distributed --devices 2\n{line}").traceback, line


def test_name_that_was_left_behind_because_it_cannot_travel(notebook: Notebook) -> None:
    notebook("it = (i for i in range(3)); late = False")
    error = notebook.fails("%%distributed --devices 2\nif late:\n    it = 1\nprint(it)")
    assert error.ename == "NameError"
    assert "The notebook has 'it', and it was left behind" in error.traceback
    assert "running frame" in error.traceback
    assert "made in  Cell In[" in error.traceback
    assert "it = (i for i in range(3))" in error.traceback  # and not the line of the cell that was to run
    assert notebook("next(it)").value == "0"
