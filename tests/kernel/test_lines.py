"""The lines people write anyway: right, or refused with the line to write instead; none hangs.

Each case is a cell of a notebook in a real kernel, on two ranks, compared with one process on the same global batches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lines import NEW, START, Line
from tests.lines.alone import LINES, check_numbers, got_alone
from tests.lines.playing import Ranks, kernel_of
from tests.support.cards import CARDS, NOT_ON_CARDS, ON_CARDS

STRATEGIES = ["ddp"] if not ON_CARDS else os.environ.get("STRATEGIES", "ddp").split()
SLOW = 20 if not ON_CARDS else 60
"""Seconds after which a cell hangs."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with kernel_of(START) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return got_alone(request, tmp_path_factory.mktemp("alone"))


@pytest.mark.limit(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name.replace(" ", "-"))
def test_line(line: Line, strategy: str, ranks: Ranks, alone: dict[str, Any], tmp_path: Path) -> None:
    if ON_CARDS and (why := NOT_ON_CARDS.get(line.name)):
        pytest.skip(why)
    notebook = ranks.notebook
    notebook(NEW + line.before)
    run = ranks.cell(f"%%distributed --strategy {strategy} --devices 2 {CARDS} {line.flags}\n{line.cell}", SLOW)
    refused = line.without.get(strategy, line.refused)
    if refused:
        assert run.error is not None, f"this should have been refused:\n{line.cell}"
        assert re.search(refused, f"{run.error.ename}: {run.error.evalue}"), run.text
        return
    assert run.error is None, run.text
    assert "differs from rank" not in run.text
    assert line.says in run.text
    check_numbers(notebook, line, alone, tmp_path)
