"""Where the cell of an elastic run goes on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nbtrain.exchange.names.cell_names import Captured
from nbtrain.session.cell import Cell
from nbtrain.session.run.elastic_run import cut

CELL = """\
import time
losses = []
for epoch in resumable(range(3)):
    losses.append(epoch)
losses.append(-1)
for x in resumable(loader):
    losses.append(time)
"""


def cell(code: str) -> Cell:
    return Cell(source=code, code=code, filename="<cell>", first_line=1, number=1)


def at(code: str, ordinal: int, reads: tuple[str, ...], **namespace: Any) -> tuple[str, int]:
    found, line = cut(
        cell(code), pickle.dumps([{"ordinal": ordinal, "index": 1}]), lambda one: Captured(hard=reads), namespace
    )
    return found.code.strip(), line


@pytest.mark.parametrize(("ordinal", "line"), [(0, 3), (1, 6)])
def test_what_stands_before_the_loop_is_not_done_again(ordinal: int, line: int) -> None:
    code, found = at(CELL, ordinal, ("losses", "loader", "time"), losses=[], loader=[], time=1)
    assert found == line
    assert code.startswith(CELL.splitlines()[line - 1])


def test_lines_keep_their_numbers() -> None:
    found, line = cut(cell(CELL), pickle.dumps([{"ordinal": 1}]), lambda one: Captured(), {})
    assert found.code.splitlines()[line - 1] == "for x in resumable(loader):"


def test_what_has_not_come_home_is_made_again() -> None:
    assert at(CELL, 0, ("losses", "time"), losses=[]) == (CELL.strip(), 0)


def test_loops_in_functions_or_conditions_begin_with_the_cell() -> None:
    for code in ("def f():\n    for i in resumable(range(2)): pass\nf()", "if 1:\n    for i in resumable([1]): pass"):
        assert at(code, 0, ()) == (code, 0)
