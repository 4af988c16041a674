"""What ranks print, as the cell shows it: whose, in which order, and what differs in one place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbtrain.base.events import Display, Output
from nbtrain.notebook.output.rank_output import FOLDER, SHOWN, Relay
from nbtrain.notebook.output.rank_widgets import RankWidgets, _unfinished
from nbtrain.notebook.output.screens import CellScreen
from nbtrain.watch.views.base import SOON, WIDGET, CellOutput


class Shown(CellScreen):
    """Keeps what is shown."""

    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[Any] = []

    def _write(self, stream: str, text: str) -> None:
        self.said.append((stream, text))

    def flush(self, stream: str) -> None:
        """All is there at once."""

    def publish(self, data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.said.append(data)

    def clear(self, wait: bool) -> None:
        self.said.append("cleared")


def folded(texts: Mapping[int, str]) -> Mapping[str, Any]:
    screen = Shown()
    relay = Relay(screen, "rank0", 0, texts, RankWidgets())
    for rank, text in texts.items():
        relay.text(Output(rank=rank, time=0.0, stream="stdout", text=text))
    relay.close(True)
    found: list[Mapping[str, Any]] = [one for one in screen.said if isinstance(one, dict)]
    assert len(found) == 1, "what differs is in one place"
    return found[0]


def test_ranks_that_differ_share_one_element() -> None:
    found = folded({0: "same\nloss 0\n", 1: "same\nloss <1>\n", 2: "same\nloss 2\n", 3: "same\nloss 2\n"})
    assert found["text/plain"] == "ranks 1, 2, 3 printed something different (2 lines): [rank 1] loss <1> …"
    assert found["text/html"] == (
        "<details><summary>ranks 1, 2, 3 printed something different (2 lines)</summary>"
        "<pre>[rank 1] loss &lt;1&gt;\n[ranks 2, 3] loss 2</pre></details>"
    )


def test_ranks_that_say_the_same_are_no_several() -> None:
    found = folded({0: "", 1: "one\n", 2: "one\n"})
    assert found["text/plain"] == "ranks 1, 2 printed something different (1 line): one"
    assert "<pre>one</pre>" in found["text/html"]


def test_many_ranks_are_counted_and_many_lines_cut() -> None:
    lines = "".join(f"line {number} of {{0}}\n" for number in range(100))
    found = folded({rank: lines.format(rank) if rank else "" for rank in range(64)})
    assert found["text/plain"].startswith("63 other ranks printed something different (6,300 lines): [rank 1] line 97")
    assert len(found["text/html"].splitlines()) <= SHOWN
    assert "[rank 63] line 99 of 63</pre>" in found["text/html"]


def test_a_line_of_our_own_begins_anew_in_the_middle_of_a_bar() -> None:
    screen = Shown()
    screen.write("stderr", "\r 50%|█████     |")
    screen.line("0:02 · step 20")
    screen.line("0:07 · step 70")
    assert screen.said[1:] == [("stderr", "\n"), ("stdout", "0:02 · step 20\n"), ("stdout", "0:07 · step 70\n")]


FIRST = "ddp · 2 ranks · cpu"


def test_the_first_line_is_an_output_of_its_own_above_what_the_cell_shows() -> None:
    screen = Shown()
    output = CellOutput(screen)
    output.begin(FIRST)
    assert screen.said == []
    screen.write("stdout", "epoch 1\n")
    output.show({"text/plain": "0:02", "text/html": "<p>"})
    output.end()
    assert screen.said[:2] == [{"text/plain": FIRST}, ("stdout", "epoch 1\n")]
    assert screen.said[2:] == [{"text/plain": f"{FIRST}\n0:02", "text/html": "<p>"}]


def test_a_cell_that_is_over_at_once_and_shows_nothing_has_a_plain_line() -> None:
    screen = Shown()
    output = CellOutput(screen)
    output.begin(FIRST)
    output.tick(0.0)
    output.end()
    output.end()
    assert screen.said == [("stdout", f"{FIRST}\n")]


def test_a_cell_that_goes_on_in_silence_shows_its_first_line_soon() -> None:
    screen = Shown()
    output = CellOutput(screen)
    output.begin(FIRST)
    for now in (0.0, SOON / 2, SOON, 2 * SOON):
        output.tick(now)
    output.end()
    assert screen.said == [{"text/plain": FIRST}]


def test_either_stream_may_have_an_open_line() -> None:
    screen = Shown()
    screen.write("stdout", "abc")
    screen.write("stderr", "x\n")
    screen.write("stderr", "")
    screen.line("ours")
    assert screen.said[-2:] == [("stdout", "\n"), ("stdout", "ours\n")]


def test_output_is_cleared_with_what_comes_in_its_place() -> None:
    """`clear_output(wait=True)` in a loop: no moment in which the figure is gone."""
    screen = Shown()
    relay = Relay(screen, "rank0", 0, (0, 1), RankWidgets())
    relay.cleared = lambda: screen.said.append("the dashboard")
    shown = Display(rank=0, time=0.0, data={"text/plain": "a figure"}, metadata={}, transient={})
    relay.display(replace(shown, data=None, wait=True))
    assert screen.said == []
    relay.display(shown)
    assert screen.said == ["cleared", "the dashboard", {"text/plain": "a figure"}]
    relay.display(replace(shown, data=None))
    assert screen.said[3:] == ["cleared", "the dashboard"]


def test_a_widget_of_which_nothing_was_shown_is_told_of_in_text() -> None:
    view = {WIDGET: {"model_id": "1"}, "text/plain": "IntProgress(value=0)"}
    assert RankWidgets().shown(view) == {"text/plain": "IntProgress(value=0)"}
    assert RankWidgets().shown({"text/plain": "1"}) == {"text/plain": "1"}


@pytest.mark.parametrize(("state", "unfinished"), [
    ({"bar_style": "", "value": 1, "max": 3}, True), ({"bar_style": "info", "value": 1, "max": 1}, True),
    ({"bar_style": "success", "value": 3, "max": 3}, False), ({"bar_style": "", "max": 3}, False),
    ({"bar_style": "", "value": None, "max": 3}, False), ({}, False),
])  # fmt: skip
def test_bars_that_are_not_at_their_end(state: dict[str, Any], unfinished: bool) -> None:
    assert _unfinished(state) is unfinished


def test_what_was_written_to_the_other_stream_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel sends both by clocks of their own."""
    order = list[str]()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, text: str) -> None:
            order.append(f"{self.name} {text}")

        def flush(self) -> None:
            order.append(f"{self.name} is sent")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(name))
    screen = CellScreen(None)
    for stream, text in (("stdout", "line"), ("stdout", "line"), ("stderr", "bar"), ("stdout", "line")):
        screen.write(stream, text)
    written, sent = ["stdout line", "stdout line"], "stdout is sent"
    assert order == [*written, sent, "stderr bar", "stderr is sent", "stdout line"]


def test_a_full_disk_costs_the_files_and_not_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank1.txt").symlink_to("/dev/full")
    screen = Shown()
    relay = Relay(screen, "files", 0, [0, 1], RankWidgets())
    for rank in (0, 1, 1):
        relay.text(Output(rank=rank, time=0.0, stream="stdout", text="line\n"))
    relay.close(True)
    said = [text for _, text in screen.said if "rank1.txt: No space left on device" in text]
    assert len(said) == 1, screen.said
    assert (tmp_path / FOLDER / "rank0.txt").read_text() == "line\n"
