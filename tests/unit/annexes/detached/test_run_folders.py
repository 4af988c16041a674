"""Folders of detached runs: numbers, states, and what is no folder of this user's."""

from __future__ import annotations

import copy
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbtrain.annexes.detached import attach_verb, runs_verb
from nbtrain.annexes.detached.detached_run import DetachedRun, same_versions
from nbtrain.annexes.detached.digests import digest
from nbtrain.annexes.detached.output_log import BEGINNING, PART, OutputLog, OutputReader
from nbtrain.annexes.detached.run_folders import END, FIGURES, RunFolder, every_run, find
from nbtrain.annexes.detached.runs_table import NotedFeed
from nbtrain.base.errors import UsageError
from nbtrain.watch.feed.feed import Feed


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBTRAIN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_numbers_and_states(place: Path) -> None:
    assert runs_verb.done(None, "") == "there is no detached run: %%distributed --detach starts one"
    first, second = RunFolder.make({"strategy": "ddp"}, place), RunFolder.make({"strategy": "fsdp"}, place)
    assert (first.number, second.number, [run.number for run in every_run()]) == (1, 2, [1, 2])
    assert {path.stat().st_mode & 0o777 for path in (place, first.path)} == {0o700}
    assert (first.path / "run.json").stat().st_mode & 0o777 == 0o600
    assert (find("").number, find("1").number) == (2, 1)
    with pytest.raises(UsageError, match="there is no detached run 7; there are 1, 2"):
        find("7")
    lock = first.hold()
    assert (first.state, second.state) == ("running", "lost")
    with pytest.raises(UsageError, match=r"run 1: ddp has not ended yet: %distributed runs stop 1"):
        runs_verb.done("drop", "1")
    first.write(END, {"how": "done", "steps": 1200})
    os.close(lock)
    assert "done, not taken home" in runs_verb.done(None, "")
    assert "step 1,200" in runs_verb.done(None, "")
    with pytest.raises(UsageError, match="run 2: fsdp does not run any more: it is lost"):
        runs_verb.done("stop", "2")
    assert runs_verb.done("drop", "2").startswith("run 2: fsdp is dropped")
    assert [run.number for run in every_run()] == [1]
    assert RunFolder.make({}, place).number == 2


def test_which_run_is_meant_without_a_number(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state: Any = SimpleNamespace(notebook={})
    runs = [RunFolder.make({"strategy": "ddp", "notebook": name}, place) for name in ("mine", "mine", "other")]
    monkeypatch.setattr(attach_verb, "notebook", lambda _: "")
    assert attach_verb.meant(state, "", lambda run: True).number == 3
    assert "run 3: ddp, which other has started" in capsys.readouterr().out
    monkeypatch.setattr(attach_verb, "notebook", lambda _: "mine")
    assert attach_verb.meant(state, "", lambda run: True).number == 2
    assert attach_verb.meant(state, "", lambda run: run.number == 1).number == 1
    assert attach_verb.meant(state, "3", lambda run: True).number == 3
    monkeypatch.setattr(attach_verb, "started_here", {runs[2].key})
    assert attach_verb.meant(state, "", lambda run: True).number == 3


def test_links_and_open_folders_are_passed_over(place: Path, tmp_path: Path) -> None:
    mine = RunFolder.make({}, place)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (place / "0002").symlink_to(tmp_path / "elsewhere")
    (place / "0003").mkdir(mode=0o755)
    (place / "0003").chmod(0o755)
    (place / "note.txt").touch()
    assert [run.number for run in every_run()] == [1]
    (mine.path / "end.json").symlink_to(tmp_path / "forged.json")
    (tmp_path / "forged.json").write_text('{"how": "done"}')
    assert mine.state == "lost"
    place.chmod(0o755)
    with pytest.raises(UsageError, match="is not a folder of yours alone"):
        RunFolder.make({}, place)


def test_output_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    log, reader = OutputLog(tmp_path), OutputReader(tmp_path)
    log.stream("stdout").write("first\n")
    log.show({"text/plain": "a figure", "image/png": b"no text"})
    assert [line.get("text") or line["display"]["text/plain"] for line in reader.new()] == ["first\n", "a figure"]
    assert list(reader.new()) == []
    block = "x" * 100_000
    for number in range(250):
        log.write("stderr", f"{number} {block}\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= BEGINNING + 2 * PART
    late = list(reader.new())
    (gone,) = [line["gone"] for line in late if "gone" in line]
    texts = [line["text"].partition(" ")[0] for line in late if "text" in line]
    assert (texts[0], texts[-1], len(texts) + gone) == ("0", "249", 250)
    assert next(OutputReader(tmp_path).new())["text"] == "first\n"
    log.close()


def test_output_that_has_no_room_does_not_spoil_what_comes_after_it(tmp_path: Path) -> None:
    log, reader = OutputLog(tmp_path), OutputReader(tmp_path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        for number in range(5):
            log.write("stdout", f"{number} {'x' * 380}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    log.write("stdout", "there is room again\n")
    log.show({"image/png": "x" * (PART + 1)})
    log.write("stdout", "y" * (PART + 1))
    shown = list(reader.new())
    assert [line.get("gone") or line["text"].split()[0] for line in shown[:5]] == ["0", "1", 3, "there", "…"]
    assert "6 MB, more than is kept" in shown[4]["text"]
    assert sum(len(line["text"]) for line in shown[5:]) == PART + 1
    log.close()


TENSORS = {"one": torch.arange(6.0)[::2], "half": [torch.ones(2, dtype=torch.bfloat16)], "none": torch.tensor(True)}


@pytest.mark.parametrize("value", [3, "text", [1, {"a": (2,)}], {"a": [1.5]}, b"bytes", TENSORS])
def test_a_digest_is_of_the_content(value: object) -> None:
    assert digest(value) == digest(copy.deepcopy(value)) != ""
    assert digest(value) != digest([value])
    assert digest(lambda: None) == ""
    assert digest(torch.ones(2)) != digest(torch.ones(2, 1)) != digest(torch.ones(2, 1).int())


def test_what_another_version_has_left_is_not_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.make({"cwd": str(place), "save_to": "."}, place)
    run.put(FIGURES, Feed({"summary": "", "began": 0.0}).snapshot())
    assert NotedFeed(run).read()
    monkeypatch.setattr("nbtrain.__version__", "0.0.9")
    assert not NotedFeed(run).read()
    with pytest.raises(UsageError, match=r"was run by Python 3.* and nbtrain .*, and here are .* 0.0.9: .* checkpoint"):
        same_versions(run)


def test_one_notebook_at_a_time_takes_it_home(place: Path) -> None:
    run = DetachedRun(RunFolder.make({}, place))
    order = []

    def other() -> None:
        with run.taking():
            order.append("the other")

    with run.taking():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("this one")
    thread.join()
    assert order == ["this one", "the other"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_belongs_to_another_user_is_passed_over(place: Path) -> None:
    mine, theirs = RunFolder.make({}, place), RunFolder.make({}, place)
    os.chown(theirs.path, 12345, -1)
    assert every_run() == [mine]
