"""The lines people write anyway: right, or refused with the line to write instead; none hangs.

Each case is a cell of a notebook in a real kernel, on two ranks, compared with one process on the same global batches.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbtrain.training.ranks import collectives
from tests.lines import NEW, START, Line, files, gradients, loops, models
from tests.lines.playing import Ranks, kernel_of, numbers
from tests.support.ranks import run_on_ranks

STRATEGIES = ["ddp"]
LINES = [*gradients.LINES, *models.LINES, *loops.LINES, *files.LINES]
SLOW = 20
"""Seconds after which a cell hangs."""


COLLECT = "torch.save(numbers([model, opt, losses, result]), {path!r})"


def one_process(rank: int, lines: list[Line], directory: str) -> dict[str, Any]:
    """The same cells, without ranks; in a process that may be left as they leave it."""
    os.chdir(directory)
    warnings.simplefilter("ignore")
    found = {}
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        for line in lines:
            try:
                found[line.name] = _alone(line)
            except Exception as error:
                found[line.name] = {"error": f"{type(error).__name__}: {error}"}
    return found


_known: dict[str, Any] = {}


def got_alone(request: pytest.FixtureRequest, directory: Path) -> dict[str, Any]:
    """What one process gets of the lines that this module's tests play, by name. It is asked once in a session,
    whichever module needs it: all of them take half a minute."""
    played = [
        item for item in request.session.items if item.module is request.module and "line" in item.callspec.params
    ]
    lines = {line.name: line for line in (item.callspec.params["line"] for item in played)}.values()
    missing = [line for line in lines if not line.refused and line.name not in _known]
    if missing:
        _known.update(run_on_ranks(one_process, missing, str(directory), world_size=1, timeout=280)[0])
    return _known


def _alone(line: Line) -> dict[str, Any]:
    own = sys.modules["__main__"].__dict__
    own.update(
        rank=0, world_size=1, device=torch.device("cpu"), reduce=collectives.reduce, gather=collectives.gather,
        barrier=lambda: None, setup=lambda *objects: objects[0] if len(objects) == 1 else objects,
    )  # fmt: skip
    for cell in (START, NEW, line.before, line.alone or line.cell, line.after):
        exec(compile(cell, f"<{line.name}>", "exec"), own)
    found = numbers([own[name] for name in ("model", "opt", "losses", "result")])
    own["loader"] = None  # persistent workers end with it
    gc.collect()
    return found


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
    notebook = ranks.notebook
    notebook(NEW + line.before)
    run = ranks.cell(f"%%distributed --strategy {strategy} --devices 2 {line.flags}\n{line.cell}", SLOW)
    refused = line.without.get(strategy, line.refused)
    if refused:
        assert run.error is not None, f"this should have been refused:\n{line.cell}"
        assert re.search(refused, f"{run.error.ename}: {run.error.evalue}"), run.text
        return
    assert run.error is None, run.text
    assert "differs from rank" not in run.text
    assert line.says in run.text
    notebook(line.after or "pass")
    path = tmp_path / "numbers.pt"
    notebook(COLLECT.format(path=str(path)))
    found, expected = torch.load(path), alone[line.name]
    assert found.keys() == expected.keys()
    apart = {
        at: float((found[at] - value).abs().max())
        for at, value in expected.items()
        if not torch.allclose(found[at], value, rtol=line.tolerance, atol=line.tolerance)
    }
    assert not apart, f"one process has other numbers:\n{textwrap.indent(str(apart), '  ')}"
