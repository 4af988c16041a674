"""What one process gets of lines, and whether a notebook with ranks has got the same."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nbtrain.worker.ranks import collectives
from tests.lines import NEW, START, Line, files, gradients, loops, models
from tests.lines.playing import numbers
from tests.support.notebook import Notebook
from tests.support.ranks import run_on_ranks

LINES = [*gradients.LINES, *models.LINES, *loops.LINES, *files.LINES]
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


def check_numbers(notebook: Notebook, line: Line, alone: dict[str, Any], directory: Path) -> None:
    """After the line's cell has run on ranks: what came of it is what one process has got."""
    notebook(line.after or "pass")
    path = directory / "numbers.pt"
    notebook(f"torch.save(numbers([model, opt, losses, result]), {str(path)!r})")
    found, expected = torch.load(path, map_location="cpu"), alone[line.name]
    assert found.keys() == expected.keys()
    apart = {
        at: float((found[at] - value).abs().max())
        for at, value in expected.items()
        if not torch.allclose(found[at], value, rtol=line.tolerance, atol=line.tolerance)
    }
    assert not apart, f"one process has other numbers:\n{textwrap.indent(str(apart), '  ')}"
