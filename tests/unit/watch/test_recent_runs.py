"""What the server's page lists of the history."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nbtrain.base.events import Metrics
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.watch.runs.write_run_file import Recorder, settings
from nbtrain.watch.server.recent_runs import LAST, recent_runs

SPEC = RunSpec(pool=PoolSpec(devices=("cpu", "cpu")), strategy="fsdp")


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBTRAIN_HISTORY", str(tmp_path / "history"))
    return tmp_path / "history"


def ran(notebook: str, ok: bool = True, **end: bool) -> None:
    namespace = {"__vsc_ipynb_file__": notebook}
    made = Recorder(lambda: settings(SPEC, source="%%distributed", number=4, kernel="k", namespace=namespace))
    made.receive(Metrics(rank=0, time=time.time(), points={"loss": [(0, 1.0)]}))
    made.closed(ok, **end)


def test_the_last_runs_of_each_notebook_the_newest_first(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a b.ipynb").touch()
    for _ in range(LAST + 2):
        ran("deep/a b.ipynb")
    ran("elsewhere.ipynb", ok=False, killed=True)
    ran("")  # a kernel without a notebook
    other, one = recent_runs(tmp_path)
    assert (one["notebook"], one["path"], [run["number"] for run in one["runs"]]) == (
        "deep/a b.ipynb", "deep/a b.ipynb", [7, 6, 5, 4, 3],
    )  # fmt: skip
    assert (other["notebook"], other["path"]) == ("elsewhere.ipynb", ""), "there is nothing to open"
    (run,) = other["runs"]
    assert {name: run[name] for name in ("cell", "strategy", "ranks", "how")} == {
        "cell": 4, "strategy": "fsdp", "ranks": 2, "how": "killed",
    }  # fmt: skip


def test_only_what_the_server_shows_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.ipynb").touch()
    (tmp_path / "out.ipynb").touch()
    for notebook in (str(root / "in.ipynb"), str(tmp_path / "out.ipynb"), "../out.ipynb", "a\0b.ipynb"):
        ran(notebook)
    assert {Path(one["notebook"]).name: one["path"] for one in recent_runs(root)} == {
        "in.ipynb": "in.ipynb", "out.ipynb": "", "a\0b.ipynb": "",
    }  # fmt: skip


def test_a_history_that_is_off_or_broken_lists_nothing(
    tmp_path: Path, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recent_runs(tmp_path) == []
    history.mkdir()
    (history / "00001.jsonl").write_text("{}")
    (history / "00002.jsonl").write_text('{"run": {"notebook": "a.ipynb"}}\n{"at": 1')
    os.chmod(history / "00001.jsonl", 0)
    assert recent_runs(tmp_path) == []
    monkeypatch.setenv("NBTRAIN_HISTORY", "off")
    assert recent_runs(tmp_path) == []
