"""Runs that are over: what is kept of them, where, how much; what is read back; metrics handed to a writer."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbtrain
from nbtrain.base.errors import UsageError
from nbtrain.base.events import Event, Failed, Finished, Memory, Metrics, Phases, RankState, Throughput, Use
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.watch.feed.across_ranks import latest
from nbtrain.watch.feed.log_to import LogTo
from nbtrain.watch.feed.series import Series
from nbtrain.watch.runs import run_folder, write_run_file
from nbtrain.watch.runs.earlier_runs import mean_curves
from nbtrain.watch.runs.history import History, Run
from nbtrain.watch.runs.run_rows import Totals
from nbtrain.watch.runs.thinning import Thinner
from nbtrain.watch.runs.write_run_file import Recorder
from tests.support.shells import Notebook, notebook

ROOT = Path(__file__).resolve().parents[3]
SPEC = RunSpec(pool=PoolSpec(devices=("cpu", "cpu")), strategy="ddp", options={"bucket_mb": 5}, accumulate=4)
SOURCE = "for x, y in loader:\n    step(x, y)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the history of this test lies."""
    where = tmp_path / "history"
    monkeypatch.setenv("NBTRAIN_HISTORY", str(where))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(write_run_file, "_said", set())
    return where


def recorder(spec: RunSpec = SPEC, say: Callable[[str], object] = print, **of: Any) -> Recorder:
    made = Recorder(partial(write_run_file.settings, spec, source=SOURCE, number=7, **of), say=say)
    made.opened("")
    return made


def metric(step: int, rank: int = 0, /, **values: float) -> Metrics:
    return Metrics(rank=rank, time=time.time(), points={name: [(step, value)] for name, value in values.items()})


def record(*events: Event, ok: bool = True, spec: RunSpec = SPEC) -> Run:
    """The run in which these events came, read back."""
    made = recorder(spec)
    for event in events:
        made.receive(event)
    made.closed(ok)
    return nbtrain.history()[-1]


def measured(rank: int, at: float) -> Iterator[Event]:
    """What a rank says of itself, `at` seconds after the run began."""
    now = time.time() + at
    steps = int(10 * at)
    yield Throughput(rank=rank, time=now, steps=steps, samples=320 * int(at), seconds=at)
    yield Memory(rank=rank, time=now, process=int(1e8 * (rank + 1)), limit=2 * 10**9)
    yield Phases(rank=rank, time=now, steps=steps, seconds=(0.1 * at, 0.2 * at, 0.3 * at, 0.1 * at, 0.1 * at, 0.2 * at))
    yield Use(rank=rank, time=now, processor=0.5)


def test_every_logged_value_comes_back() -> None:
    run = record(metric(1, loss=0.7), metric(1, 1, loss=0.8), metric(2, loss=0.1, acc=1 / 3), metric(2, 1, loss=0.2))
    assert run.metrics.to_dict("records")[1] == {"rank": 0, "step": 2, "loss": 0.1, "acc": 1 / 3}
    assert list(run.metrics["loss"]) == [0.7, 0.1, 0.8, 0.2]
    assert list(run.metrics["rank"]) == [0, 0, 1, 1]
    assert run.figures["last"] == {"loss": pytest.approx(0.15), "acc": 1 / 3}
    assert (run.ended, run.figures["steps"]) == ("done", 2)


def test_what_goes_wrong_after_the_ranks_have_ended_is_a_failure() -> None:
    made = recorder()
    made.receive(metric(1, loss=0.7))
    made.receive(Finished(rank=0, time=time.time(), steps=1))
    made.closed(False, "no room left in /dev/shm")
    assert nbtrain.history()[-1].ended == "failed: no room left in /dev/shm"


def test_the_time_in_which_work_waits_for_the_notebook_is_not_the_runs() -> None:
    made = recorder()
    made.receive(metric(1, loss=0.7))
    made.ranks_ended()
    time.sleep(0.3)
    made.closed(True)
    assert nbtrain.history()[-1].seconds < 0.2


@pytest.mark.parametrize(("of_ranks", "last"), [
    ([[(1, 4.0), (2, 2.0)], [(1, 6.0)]], 5.0),  # rank 1 tells step 2 a moment later
    ([[(9, 1.0)], [(3, 2.0)]], 1.5),
    ([[(1, math.nan)], [(1, 2.0)]], 2.0),
    ([[(1, math.nan)], [(1, math.inf)]], math.nan),
    ([[(1, 1.0), (1, 3.0)], [(1, 2.0), (1, 5.0)]], 4.0),  # twice in a step
    ([[(1, 1e308)], [(1, 1e308)]], 1e308),
])  # fmt: skip
def test_the_last_value_is_the_mean_over_the_ranks_as_in_the_picture(
    of_ranks: list[list[tuple[float, float]]], last: float
) -> None:
    totals, curves = Totals(), {}
    for rank, points in enumerate(of_ranks):
        totals.add("metrics", rank, "loss", points)
        curves[rank] = Series()
        curves[rank].extend(points)
    assert totals.figures()["last"] == {"loss": pytest.approx(last, nan_ok=True)}
    if not math.isnan(last):
        assert latest(curves).mean == pytest.approx(last)


def test_metrics_that_are_called_like_columns_take_nothing_away() -> None:
    run = record(metric(3, step=30.0, rank=9.0, run=8.0, steps=4.0))
    assert run.metrics.to_dict("records") == [
        {"rank": 0, "step": 3, "step_": 30.0, "rank_": 9.0, "run_": 8.0, "steps": 4.0}
    ]
    row = nbtrain.history().frame.to_dict("records")[0]
    assert (row["steps"], row["steps_"], row["run"], row["run_"]) == (3, 4.0, run.number, 8.0)


def test_values_that_are_not_finite_come_back_and_each_line_is_json() -> None:
    values = [1.0, math.nan, math.inf, -math.inf, 2.0]
    run = record(*(metric(step, loss=value) for step, value in enumerate(values)))
    assert [repr(value) for value in run.metrics["loss"]] == [repr(value) for value in values]

    def refuse(word: str) -> None:
        raise AssertionError(word)

    path = run_folder.files(Path(os.environ["NBTRAIN_HISTORY"]))[0][1]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert "nan" in repr(record(metric(1, loss=math.nan)))


def test_settings() -> None:
    settings = record(metric(1, loss=1.0)).settings
    assert settings["options"] == {"bucket_mb": 5}
    assert settings["asked"] == {"accumulate": 4}
    assert (settings["strategy"], settings["world_size"], settings["devices"]) == ("ddp", 2, ["cpu", "cpu"])
    assert (settings["cell"], settings["source"], len(settings["hash"])) == (7, "for x, y in loader:", 16)
    assert settings["versions"]["nbtrain"] == nbtrain.__version__


def test_memory_throughput_phases_and_use() -> None:
    run = record(*(event for at in (1.0, 2.0, 3.0) for rank in (0, 1) for event in measured(rank, at)))
    assert run.memory["process"].tolist() == [1e8] * 3 + [2e8] * 3
    assert run.throughput["samples_per_second"].tolist()[1:3] == [320.0, 320.0]
    assert run.phases["backward"].tolist() == pytest.approx([0.3, 0.6, 0.9] * 2)
    assert run.use["processor"].tolist() == [0.5] * 6
    assert run.memory["seconds"].tolist() == pytest.approx([1, 2, 3] * 2, abs=0.5)
    figures = run.figures
    assert (figures["steps"], figures["samples_per_second"], figures["peak_memory"]) == (30, 640.0, 2e8)
    assert "backward 30 ms" in repr(run)


@pytest.mark.parametrize(("event", "ended"), [
    (Failed(rank=1, time=0, name="ValueError", text="no", lines=()), "failed: ValueError on rank 1"),
    (Failed(rank=1, time=0, name="KeyboardInterrupt", text="", lines=(), interrupted=True), "stopped"),
    (RankState(rank=0, time=0, state="dead"), "failed: rank 0 died"),
])  # fmt: skip
def test_how_it_ended(event: Event, ended: str) -> None:
    assert record(metric(1, loss=1.0), event, ok=False).ended == ended


def test_a_cell_that_does_nothing_leaves_nothing(folder: Path) -> None:
    made = recorder()
    made.tick(0.0)
    made.receive(Finished(rank=0, time=time.time(), steps=0))
    made.closed(True)
    assert not folder.exists()
    assert repr(nbtrain.history()).startswith("no runs of this notebook yet; %distributed history all shows those of")


@pytest.mark.parametrize("ok", [True, False])
def test_a_short_cell_that_trains_is_kept(ok: bool) -> None:
    failed = Failed(rank=0, time=time.time(), name="KeyError", text="", lines=(), steps=3)
    run = record(Finished(rank=0, time=time.time(), steps=3) if ok else failed, ok=ok)
    assert (run.figures["steps"], run.ended) == (3, "done" if ok else "failed: KeyError on rank 0")
    assert run.metrics.empty
    assert list(run.memory.columns)[:3] == ["rank", "seconds", "process"]


def test_a_long_cell_is_kept_whatever_it_does(folder: Path) -> None:
    made = recorder()
    made.tick(0.0)
    made.tick(1.9)
    assert not folder.exists()
    made.tick(2.0)
    assert [run.ended for run in nbtrain.history()] == ["running"]
    made.closed(True)
    assert [run.ended for run in nbtrain.history()] == ["done"]


def test_many_values_take_little_room_and_what_matters_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_run_file, "METRIC_BYTES", 400_000)
    made, last = recorder(), 100_000
    wild = {12_345: 50.0, 65_432: -50.0, 99_998: math.nan}
    for step in range(last):
        made.receive(metric(step, loss=wild.get(step, step % 997 / 997)))
        if step % 500 == 0:
            made.receive(metric(step, accuracy=step / last))
            made.tick(step / 100)
    made.receive(metric(last, loss=0.25))
    made.closed(True)
    run = nbtrain.history()[-1]
    assert 200_000 < made.path.stat().st_size < 450_000
    kept = dict(run.metrics[["step", "loss"]].dropna(subset="loss").values.tolist())
    assert (kept[0], kept[12_345], kept[65_432], kept[last]) == (0.0, 50.0, -50.0, 0.25)
    assert [step for step in range(1_000) if kept[step] != step % 997 / 997] == []  # whole as long as they were few
    assert len(run.metrics["accuracy"].dropna()) == 200  # so is what was logged rarely
    assert max(after - before for before, after in pairwise(sorted(kept))) < last / 50
    assert "100,201 values" in repr(run)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(allow_infinity=False) | st.just(0.0), min_size=1, max_size=400),
    budget=st.integers(min_value=0, max_value=20_000),
    flush=st.integers(min_value=1, max_value=50),
)
def test_thinning_keeps_extremes_both_ends_and_the_order(values: list[float], budget: int, flush: int) -> None:
    thinner, kept = Thinner(budget, 1), []
    for number, value in enumerate(values):
        thinner.add(("metrics", 0, "a"), [(number, value)], (1,))
        if number % flush == 0:
            ready = thinner.ready().get(("metrics", 0, "a"), [])
            thinner.written(40 * len(ready))
            kept += ready
    kept += thinner.ready(end=True).get(("metrics", 0, "a"), [])
    steps = [row[0] for row in kept]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert all(repr(row[1]) == repr(values[row[0]]) for row in kept)
    known = [value for value in values if value == value]
    if known:
        there = [row[1] for row in kept if row[1] == row[1]]
        assert (min(there), max(there)) == (min(known), max(known))
    if len(known) < len(values):
        assert any(row[1] != row[1] for row in kept)


def test_the_oldest_go_and_never_one_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "RUNS", 3)
    first = recorder()
    first.receive(metric(1, loss=1.0))
    first.tick(0.0)
    numbers = [record(metric(1, loss=1.0)).number for _ in range(5)]
    assert numbers == [2, 3, 4, 5, 6]
    assert [(run.number, run.ended) for run in nbtrain.history()] == [(1, "running"), (5, "done"), (6, "done")]
    first.closed(True)
    monkeypatch.setattr(run_folder, "TOTAL", 10)
    assert record(metric(1, loss=1.0)).number == 7
    assert [run.number for run in nbtrain.history()] == [7]


def test_only_the_user_can_read_it(folder: Path) -> None:
    record(metric(1, loss=1.0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NBTRAIN_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run_folder.folder() == tmp_path / "nbtrain" / "history"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder.folder() == tmp_path / ".local" / "share" / "nbtrain" / "history"


def test_off_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_HISTORY", "off")
    made = recorder()
    made.receive(metric(1, loss=1.0))
    made.tick(5.0)
    made.closed(True)
    assert made.path is None
    assert repr(nbtrain.history()) == "no history is kept: NBTRAIN_HISTORY is off"
    with pytest.raises(IndexError, match="no history is kept"):
        nbtrain.history()[-1]
    with pytest.raises(UsageError, match="no history is kept"):
        nbtrain.history().plot("loss")


def test_a_folder_that_cannot_be_made_is_said_once(folder: Path) -> None:
    folder.write_text("in the way")
    said: list[str] = []
    for _ in range(2):
        made = recorder(say=said.append)
        made.receive(metric(1, loss=1.0))
        made.tick(1.0)
        made.receive(metric(2, loss=1.0))
        made.tick(3.0)
        made.closed(True)
    assert len(said) == 1
    assert "\n" not in said[0]
    assert f"not kept, and the run goes on: {folder}: " in said[0]


OTHER = """
import os, time
from nbtrain.base.events import Memory, Metrics
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.watch.runs.write_run_file import Recorder, settings
def recorder():
    made = Recorder(lambda: settings(RunSpec(pool=PoolSpec()), source="1", number=1)); made.opened(""); return made
def metric(step, **values):
    return Metrics(rank=0, time=time.time(), points={name: [(step, value)] for name, value in values.items()})
made = recorder()
"""


def in_another_process(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OTHER + code], cwd=ROOT, text=True, stdout=subprocess.PIPE)


def test_a_full_disk_ends_the_record_and_not_the_run() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for step in range(20_000):
    made.receive(metric(step, loss=1 / 3))
    if step % 100 == 0:
        made.tick(step / 10)
made.closed(True)
print('went on')
"""
    with in_another_process(code) as process:
        said, _ = process.communicate(timeout=60)
    assert said.count("the history of this run is not kept, and the run goes on") == 1
    assert said.endswith("went on\n")
    (run,) = nbtrain.history(all=True)
    assert run.ended.startswith("lost at")
    assert len(run.metrics) > 1_000  # what was written is read, but for the line that was cut off


def test_notebooks_that_write_at_once_do_not_meet(folder: Path) -> None:
    code = """
for number in range(20):
    if number: made = recorder()
    made.receive(metric(1, loss=os.getpid())); made.tick(0.0); made.closed(True)
"""
    processes = [in_another_process(code) for _ in range(3)]
    for process in processes:
        with process:
            process.communicate(timeout=60)
    runs = nbtrain.history(all=True)
    assert [run.number for run in runs] == list(range(1, 61))
    assert sorted(run.figures["last"]["loss"] for run in runs) == sorted(
        float(p.pid) for p in processes for _ in range(20)
    )


def test_other_files_and_torn_ones_are_passed_over(folder: Path) -> None:
    number = record(metric(1, loss=1.0), metric(2, loss=2.0)).number
    path = folder / f"{number:05}.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    (folder / "00077.jsonl").write_text("")
    (folder / "00078.jsonl").write_text('{"no": "run"}\n')
    (folder / "notes.txt").write_text("mine")
    (folder / "00100.jsonl").write_text('{"run": 3}\n')
    os.mkfifo(folder / "00079.jsonl")
    (run,) = nbtrain.history()
    repr(nbtrain.history())
    assert run.ended.startswith("lost at")
    assert run.metrics["loss"].tolist() == [1.0, 2.0]
    assert record(metric(1, loss=1.0)).number == 101


def test_the_runs_of_this_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    here = record(metric(1, loss=1.0))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ada/one.ipynb")
    one = record(metric(1, loss=2.0))
    assert [run.number for run in nbtrain.history()] == [one.number]
    assert "one.ipynb" in repr(nbtrain.history(all=True))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ada/two.ipynb")
    assert len(nbtrain.history()) == 0
    assert [run.number for run in nbtrain.history(all=True)] == [here.number, one.number]
    assert run_folder.notebook({"__vsc_ipynb_file__": "/home/ada/three.ipynb"}) == "/home/ada/three.ipynb"


def test_where_notebooks_have_no_names_the_kernel_decides() -> None:
    other = recorder(kernel="another")
    other.receive(metric(1, loss=1.0))
    other.closed(True)
    mine = record(metric(1, loss=1.0))
    assert [run.number for run in nbtrain.history()] == [mine.number]
    assert [run.settings["kernel"] for run in nbtrain.history(all=True)] == ["another", run_folder.kernel()]


@pytest.fixture
def runs() -> History:
    record(metric(1, loss=0.7), metric(2, loss=0.2), *measured(0, 1.0), *measured(0, 2.0))
    record(metric(1, loss=0.6), metric(2, loss=0.1), metric(2, 1, loss=0.15), ok=False)
    return nbtrain.history()


def test_the_table(runs: History) -> None:
    head, line, first, second = repr(runs).splitlines()
    assert head.split()[:3] == ["run", "when", "cell"]
    assert set(line) == {"─", " "}
    assert "[7] for x, y in loader:" in first
    assert "ddp --bucket-mb 5" in first
    assert "loss 0.2" in first
    assert first.rstrip().endswith("done")
    assert second.rstrip().endswith("stopped")
    assert "loss 0.2</span></td>" in runs._repr_html_()
    assert runs.frame["run"].tolist() == [1, 2]
    assert runs.frame["loss"].tolist() == [0.2, 0.125]


def test_what_html_shows_is_text() -> None:
    spec = RunSpec(pool=PoolSpec(), strategy="<b>")
    run = record(metric(1, **{"<i>": 1.0}), metric(2, **{"<i>": 2.0}), spec=spec)
    assert "<b>" not in run._repr_html_()
    assert "<i>" not in run._repr_html_()
    assert "<i>" not in nbtrain.history()._repr_html_()


def test_runs_by_number(runs: History) -> None:
    assert runs[2].number == runs[-1].number == 2
    assert [run.number for run in reversed(runs)] == [2, 1]
    assert [run.number for run in runs[-1:]] == [2]
    with pytest.raises(IndexError, match="there is no run 3 here; the last ones are 1, 2"):
        runs[3]


def test_all_runs_at_once(runs: History) -> None:
    assert runs.metrics.groupby("run")["loss"].min().to_dict() == {1: 0.2, 2: 0.1}
    assert list(runs.metrics.columns) == ["run", "rank", "step", "loss"]
    assert runs.memory["run"].tolist() == [1, 1]
    assert list(runs[-1:].phases.columns)[:4] == ["run", "rank", "seconds", "steps"]


def test_plots(runs: History) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    one = runs.plot("loss")
    assert [line.get_label() for line in one.lines] == ["run 1 ddp", "run 2 ddp"]
    assert one.lines[1].get_ydata().tolist() == [0.6, 0.1]
    several = runs[1].plot("loss", "throughput", "phases")
    assert [axes.get_title() for axes in several] == ["loss", "samples/s", "a step, ms"]
    assert [line.get_label() for line in runs[2].plot().lines] == ["rank 0", "rank 1"]
    _, mine = pyplot.subplots()
    assert runs.plot("memory", ax=mine) is mine
    pyplot.close("all")
    with pytest.raises(UsageError, match="run 2 has nothing called 'los'; there are loss"):
        runs[2].plot("los")
    with pytest.raises(UsageError, match="none of these 2 runs has anything called 'phases' that could be compared"):
        runs.plot("phases")
    with pytest.raises(UsageError, match="nothing to plot"):
        History([]).plot()


def test_without_pandas_and_matplotlib(runs: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert runs.metrics[0] == {"run": 1, "rank": 0, "step": 1, "loss": 0.7}
    assert runs[2].memory == []
    picture = runs.plot("loss")
    assert "pip install matplotlib" in repr(picture)
    assert picture.svg.count("<polyline") == 2
    assert "run 2 ddp" in picture.svg
    assert picture._repr_html_() == picture.svg


def test_reading_needs_no_torch(runs: History) -> None:
    code = "import sys, nbtrain; print(nbtrain.history(all=True)); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "False"
    assert "loss 0.2" in told


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


def test_the_verb(nb: Notebook, runs: History, capsys: pytest.CaptureFixture[str]) -> None:
    nb.run("%distributed history")
    assert capsys.readouterr().out.rstrip() == repr(nbtrain.history())
    nb.run("%distributed history 1")
    assert capsys.readouterr().out.startswith("run 1: ")
    nb.run("%distributed history all")
    assert "notebook" in capsys.readouterr().out.splitlines()[0]
    assert "history takes the number of a run, or all, not 'last'" in nb.complaint("%distributed history last")
    assert "there is no run 9 here" in nb.complaint("%distributed history 9")
    assert nb.recorders == []  # no session is opened for it


class Writer:
    """What TensorBoard's has."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag == "bad":
            raise RuntimeError("no room")
        self.calls.append((tag, value, step))

    def flush(self) -> None:
        self.flushed += 1


def test_a_writer_gets_what_is_logged() -> None:
    writer = Writer()
    sink = LogTo(writer)
    sink.receive(metric(1, 1, loss=0.2, only=5.0))
    sink.receive(metric(1, loss=0.1))
    for now in (0.0, 0.5, 1.0):
        sink.tick(now)
    assert writer.calls == [("loss/rank1", 0.2, 1), ("only", 5.0, 1), ("loss", 0.1, 1)]
    sink.receive(metric(2, 1, loss=0.4))
    sink.closed(True)
    assert writer.calls[3:] == [("loss/rank1", 0.4, 2)]
    assert writer.flushed == 1


def test_a_writer_that_fails_is_said_once() -> None:
    writer, said = Writer(), list[str]()
    sink = LogTo(writer, said.append)
    for step in range(3):
        sink.receive(metric(step, loss=1.0, bad=2.0))
    sink.tick(0.0)
    sink.tick(2.0)
    sink.receive(metric(4, loss=1.0))
    sink.closed(True)
    assert said == ["nbtrain: --log-to gets nothing more of this run: Writer raised RuntimeError: no room"]
    assert writer.calls == [("loss", 1.0, 0)]


# runs that the dashboard compares with


def test_an_earlier_run_is_the_mean_over_its_ranks() -> None:
    many = [metric(step, rank, loss=step + 10.0 * rank) for step in range(3000) for rank in (0, 1)]
    run = record(*many, metric(0, lr=math.nan))
    found = mean_curves(run.number)
    loss = found["loss"]
    assert len(loss["x"]) <= 512
    assert loss["count"] == len(loss["x"]) == len(loss["low"])
    assert loss["last"] == 2999 + 5
    assert all(abs(y - 5 - x) < 10 for x, y in zip(loss["x"], loss["low"], strict=True))
    assert (found["lr"]["last"], found["lr"]["low"], found["lr"]["bad"]) == ("NaN", [None], [1])
    assert mean_curves(run.number + 1) == {}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\nfrom torch import (\n    nn,\n)\n\n# two rounds\nfor x in loader:\n    pass", "for x in loader:"),
        ('%env A=1\n!ls\n  \n"""Trains."""\nmodel.train()', "model.train()"),
        ("x = 1\nimport os", "x = 1"),
        ("# nothing\nimport os", "# nothing"),
        ("# nbtrain.run: train\nwith nbtrain_around:\n    nbtrain_result = train()\n", "# nbtrain.run: train"),
        ("# run train.py\nnbtrain_run_script(nbtrain_script, nbtrain_arguments)", "# run train.py"),
        ("import lightning as L\nfit(L, 'nbtrain_ddp')", "fit(L, 'nbtrain_ddp')"),
        ("files = !ls\nfit()", "files = !ls"),
    ],
)
def test_the_line_that_tells_what_a_cell_does(source: str, line: str) -> None:
    settings = write_run_file.settings(RunSpec(pool=PoolSpec()), source=source, number=1)
    assert settings["source"] == line
