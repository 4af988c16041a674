"""What the dashboard lists of earlier runs, and how little is read for it: no more than is new, or shown."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import nbtrain
from nbtrain.watch.runs import read_run_file, run_folder
from nbtrain.watch.runs.earlier_runs import OFFERED, earlier_runs, mean_curves
from nbtrain.watch.runs.history import Run

LINES = 50
"""of a run whose kernel has died, two values in each"""
HERE, ELSEWHERE = "here.ipynb", "elsewhere.ipynb"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBTRAIN_HISTORY", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", HERE)
    read_run_file._summed.cache_clear()
    return tmp_path


class Read:
    """What is read of runs' files since it was last asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lines = 0
        self._files: list[int] = []
        monkeypatch.setattr(read_run_file, "_parsed", self._parsed(read_run_file._parsed))
        monkeypatch.setattr(read_run_file, "open", self._open, raising=False)

    @property
    def lines(self) -> int:
        """Lines of values that were parsed."""
        found, self._lines = self._lines, 0
        return found

    @property
    def files(self) -> list[int]:
        found, self._files = sorted(set(self._files)), []
        return found

    def _parsed(self, parse: Any) -> Any:
        def counted(text: str | bytes) -> Mapping[str, Any]:
            found: Mapping[str, Any] = parse(text)
            self._lines += "metrics" in found
            return found

        return counted

    def _open(self, path: Path, *how: str, **more: str) -> Any:
        self._files.append(int(path.stem))
        return builtins.open(path, *how, **more)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    return Read(monkeypatch)


def settings(notebook: str = HERE, **more: Any) -> str:
    found = {
        "format": 1, "notebook": notebook, "kernel": "k", "began": 1.7e9, "strategy": "ddp", "cell": 1, "world_size": 1,
        "devices": ["cpu"], "options": {}, "source": "", "precision": "32", **more,
    }  # fmt: skip
    return json.dumps({"run": found}) + "\n"


def values(number: int) -> str:
    """A line of the file."""
    rows = [[2 * number, 0.5], [2 * number + 1, number / 10]]
    return json.dumps({"at": float(number), "metrics": {"0": {"loss": rows}}}) + "\n"


def lost(number: int, notebook: str = HERE, lines: int = LINES) -> Path:
    """A run whose kernel has died: its last line is missing."""
    found = run_folder.folder()
    assert found is not None
    path = run_folder.file(found, number)
    path.write_text(settings(notebook) + "".join(map(values, range(lines))))
    return path


def done(number: int, notebook: str = HERE) -> None:
    path = lost(number, notebook)
    none = dict.fromkeys(("steps_per_second", "samples_per_second", "peak_memory"))
    figures = {"steps": 7, "samples": 0, "logged": 2 * LINES, "last": {"loss": 0.25}, **none}
    with path.open("a") as file:
        file.write(json.dumps({"at": 60.0, "end": {"how": "done", "text": ""}, "figures": figures}) + "\n")


def only() -> Run:
    (run,) = nbtrain.history()
    return run


def test_of_other_notebooks_one_line_is_read(read: Read) -> None:
    for number in range(1, 11):
        lost(number, ELSEWHERE)
    assert earlier_runs() == []
    assert (read.lines, len(read.files)) == (0, 10)
    assert len(nbtrain.history()) == 0
    assert read.lines == 0


def test_a_run_with_its_last_line_is_not_read_as_a_whole(read: Read) -> None:
    done(1)
    assert [run["number"] for run in earlier_runs()] == [1]
    assert (only().ended, only().figures["last"]) == ("done", {"loss": 0.25})
    assert read.lines == 0


def test_a_run_whose_kernel_has_died_is_read_once(read: Read) -> None:
    lost(1)
    (found,) = earlier_runs()
    assert "loss 4.9" in found["title"]
    assert read.lines == LINES + 1, "its last line was looked at for an end"
    assert earlier_runs() == [found]
    assert read.lines == 1


def test_a_file_that_grows_is_read_again() -> None:
    path = lost(1)
    assert only().figures["logged"] == 2 * LINES
    with path.open("a") as file:
        file.write(values(LINES) + values(LINES + 1)[:-5])
    run = only()
    assert (run.figures["logged"], run.figures["steps"], run.seconds) == (2 * LINES + 2, 2 * LINES + 1, LINES)
    with path.open("a") as file:
        file.write(values(LINES + 1)[-5:])
    assert (only().figures["logged"], only().figures["last"]) == (2 * LINES + 4, {"loss": (LINES + 1) / 10})
    assert run.figures["logged"] == 2 * LINES + 2, "what was told of it does not change"


def test_older_runs_than_are_offered_are_not_opened(read: Read) -> None:
    for number in range(1, OFFERED + 6):
        lost(number, lines=2)
    lost(OFFERED + 6, lines=0)  # logged nothing
    assert [run["number"] for run in earlier_runs()] == list(range(6, OFFERED + 6)), "the oldest first"
    assert read.files == list(range(6, OFFERED + 7))


def test_curves_are_those_of_one_file(read: Read) -> None:
    for number in (1, 2, 3):
        lost(number)
    lost(4, ELSEWHERE)
    assert mean_curves(2)["loss"]["count"] == 2 * LINES
    assert read.files == [2]
    assert [mean_curves(number) for number in (4, 5, -1)] == [{}, {}, {}]
    assert read.files == [4]
