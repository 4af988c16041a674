"""The report of `make bench PEERS=1`: who is first, what is compared, what it says where there is no figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.peers import report as module
from benchmarks.peers.kept import Kept
from benchmarks.peers.peer import Cannot, Peer
from benchmarks.peers.registry import PEERS
from benchmarks.peers.report import BEGIN, END, Report
from benchmarks.peers.rows import Found, Reading, Row

NAMES = ["nbtrain", "ipyparallel", "accelerate"]
HANGS = "hangs: the cell is not over after 60 s"


def row(ours: float | None, theirs: float | None, forked: Reading | None = None, slack: float = 1.0) -> Row:
    """nbtrain, ipyparallel and accelerate in one row."""
    readings = dict(zip(NAMES, [Reading(ours), Reading(theirs), forked or Reading(None, HANGS)], strict=True))
    return Row("an empty warm cell, 2 ranks", "ms", readings, "over 8.0 ms", slack)


@pytest.fixture(autouse=True)
def _reports_stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MADE", tmp_path)


def report(*rows: Row) -> Report:
    made = Report(NAMES)
    for one in rows:
        made.add(one)
    return made


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        (row(5.0, 9.0), True),
        (row(9.0, 5.0), False),
        (row(5.0, None), True),
        (row(None, 9.0), False),
        (row(9.0, 9.0), True),
        (row(9.1, 9.0), False),
        (row(9.1, 9.0, slack=1.03), True),
        (row(9.0, 10.0, Reading(2.0, "begins anew", ranked=False)), True),
        (row(9.0, 10.0, Reading(2.0)), False),
    ],
)
def test_first_is_who_needs_least_of_those_that_did_the_same_work(measured: Row, first: bool) -> None:
    assert measured.first() is first
    assert report(measured).verdict() == int(not first)


def test_what_is_not_first_is_said_with_both_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(row(5.0, 9.0), row(12.0, 9.0)).verdict() == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("not first")] == [
        "not first: an empty warm cell, 2 ranks: 12.0 ms, ipyparallel 9.00 ms"
    ]


def test_the_table_marks_the_first_and_says_below_why_there_is_no_figure() -> None:
    text = report(row(5.0, 9.0), row(9.0, 5.0, Reading(2.0, "begins anew", ranked=False))).text()
    cells = [line for line in text.splitlines() if line.startswith("| an empty")]
    title = "| an empty warm cell, 2 ranks<br>*over 8.0 ms* |"
    assert cells == [
        f"{title} **5.00 ms** | 9.00 ms | — <sup>1</sup> | 0.56 × |",
        f"{title} 9.00 ms | **5.00 ms** | (2.00 ms) <sup>2</sup> | 1.80 × |",
    ]
    assert f"1. {HANGS}\n2. begins anew\n" in text


def test_a_package_that_fails_once_has_no_figure_but_its_earlier_ones_are_said() -> None:
    def hang() -> float:
        raise Cannot(HANGS)

    found = Found()
    for measured in (lambda: 0.2, lambda: 0.4, hang, lambda: 0.3):
        found.measure("accelerate", measured)
    (reading,) = found.readings(["accelerate"]).values()
    assert reading == Reading(None, f"{HANGS}; before that 2 times 0.3 s")


@pytest.mark.parametrize(("seconds", "times"), [(0.5, 9), (2.0, 5), (12.0, 2), (30.0, 1)])
def test_what_takes_long_is_measured_a_few_times(seconds: float, times: int) -> None:
    found = Found()
    for _ in range(9):
        found.measure("ray", lambda: seconds)
    assert len(found.values["ray"]) == times
    found.drop_first(3)
    assert len(found.values["ray"]) == max(1, times - 3)


def test_a_run_that_was_ended_goes_on_after_its_last_whole_group(tmp_path: Path) -> None:
    file, what = tmp_path / "rows.json", ["a7e3387", NAMES, False]
    measured = row(5.0, 9.0, Reading(2.0, "begins anew", ranked=False))

    def ended() -> Iterator[Row]:
        yield measured
        raise KeyboardInterrupt

    first = Kept(file, what, go_on=False)
    assert [*first.rows("start", lambda: iter([measured]))] == [measured]
    with pytest.raises(KeyboardInterrupt):
        list(first.rows("cell", ended))
    second = Kept(file, what, go_on=True)
    assert second
    assert [*second.rows("start", ended)] == [measured]
    assert [*second.rows("cell", lambda: iter([measured, measured]))] == [measured, measured]
    assert not Kept(file, what, go_on=False)
    with pytest.raises(SystemExit, match="is of"):
        Kept(file, ["another", NAMES, False], go_on=True)


def test_a_row_is_drawn_if_two_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(f"# How fast\n\n{BEGIN}old\n{END}after\n")
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("PICTURES", tmp_path / "pictures"), ("MADE", tmp_path)):
        monkeypatch.setattr(module, name, value)
    made = report(row(5.0, 9.0), row(5.0, None), row(0.0, 0.0))
    made.load = 0.0
    made.write(whole=False)
    assert "old" in page.read_text()
    made.write(whole=True)
    text = page.read_text()
    assert text.startswith(f"# How fast\n\n{BEGIN}Of ")
    assert text.endswith(f"(pictures/peers/01.svg)\n{END}after\n")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["01.svg"]
    assert "9.00 ms ipyparallel" in (tmp_path / "pictures" / "01.svg").read_text()


def test_figures_of_a_busy_machine_or_without_a_package_stay_out_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "performance.md"
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("PICTURES", tmp_path / "pictures"), ("MADE", tmp_path)):
        monkeypatch.setattr(module, name, value)
    busy, lacking = report(row(5.0, 9.0)), Report(NAMES, missing=["ray"])
    busy.load, lacking.load = 2.0, 0.0
    for one in (busy, lacking):
        one.write(whole=True)
    assert not page.exists()


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_cells_of_a_package_are_python(peer: Peer) -> None:
    loop = "work.loop(model, optimizer, batch, 5, 'file')"
    cells = [*peer.start(2), peer.cell("a = 1\nb = 2", 2), *peer.make_model("model, optimizer, batch = 1, 2, 3", 2)]
    cells.append(peer.train(loop, 2))
    for way in (peer.send, peer.home):
        with suppress(Cannot):
            cells.append(way("a = 1\nb = 2", 2))
    for cell in cells:
        lines = cell.splitlines()
        compile("\n".join(line for line in lines if not line.startswith("%")), peer.name, "exec")
