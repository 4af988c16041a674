"""The figures a run shows, as text and as HTML, and which of them is chosen where."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from nbtrain.errors import UsageError
from nbtrain.events import Event, Failed, Finished, Memory, Metric, Progress, RankState, Throughput
from nbtrain.views import NoView, choose
from nbtrain.views.base import POINTS, Curve, Figures, Rate, duration, metric, place, quantity
from nbtrain.views.html import ROWS, HtmlView, sparkline
from nbtrain.views.text import TextView
from nbtrain.words import size

MB = 10**6


def throughput(rank: int, seconds: float, steps: int, samples: int) -> Event:
    return Throughput(rank=rank, time=seconds, seconds=seconds, steps=steps, samples=samples)


def progress(seconds: float, done: int, total: int | None, epoch: int = 0, rank: int = 0) -> Event:
    return Progress(rank=rank, time=seconds, done=done, total=total, epoch=epoch)


def logged(rank: int, step: int, **values: float) -> Event:
    return Metric(rank=rank, time=0.0, step=step, values=values)


def failed(rank: int, name: str = "ValueError", interrupted: bool = False) -> Event:
    return Failed(rank=rank, time=0.0, name=name, text="", lines=(), exception=None, interrupted=interrupted)


# figures


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.value is None
    for second in range(100):
        rate.add(second, second * 10)
    for second in range(100, 110):
        rate.add(second, 990 + (second - 99) * 40)
    assert rate.value == 40
    rate.add(111, 0)  # a new count
    assert rate.value is None
    rate.add(111, 3)  # no time has passed
    assert rate.value is None


def test_a_rate_with_readings_far_apart_spans_two_of_them() -> None:
    rate = Rate()
    for second, total in ((0, 0), (60, 600), (120, 600)):
        rate.add(second, total)
    assert rate.value == 0


def test_a_curve_stays_small_and_spans_the_run() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, step / 2)
    assert POINTS / 2 <= len(curve.points) <= POINTS
    assert curve.points[0] == (0, 0.0)
    assert curve.points[-1][0] > 98_000
    gaps = {after[0] - before[0] for before, after in pairwise(curve.points)}
    assert len(gaps) == 1
    curve.add(100_000, math.nan)
    assert math.isnan(curve.last)
    assert all(math.isfinite(value) for _, value in curve.points)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (310_400_000, "310 MB"), (999_600_000, "1 GB"), (1.24e9, "1.24 GB"),
     (80e9, "80 GB"), (3.2e12, "3.2 TB")],
)  # fmt: skip
def test_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (59.6, "1:00"), (723, "12:03"), (3723, "1:02:03")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert [quantity(v) for v in (0.519, 28.12, 99.96, 3600.4)] == ["0.519", "28.1", "100", "3,600"]
    assert [metric(v) for v in (0.12345, 1e-5, 12345.6, math.nan)] == ["0.1235", "1e-05", "1.235e+04", "nan"]


def test_time_left_is_of_this_epoch() -> None:
    figures = Figures()
    for second in range(11):
        figures.receive(progress(second, second * 10, 400))
    assert figures.lead.left == 30
    assert place(figures.lead) == "epoch 1 · 100/400 · 25 % · 0:30 left"
    figures.receive(progress(11, 2, 400, epoch=1))
    assert place(figures.lead) == "epoch 2 · 2/400 · 0 %"
    figures.receive(progress(12, 400, 400, epoch=1))
    assert place(figures.lead) == "epoch 2 · 400/400 · 100 %"
    figures.receive(progress(13, 7, None, epoch=2))
    assert place(figures.lead) == "epoch 3 · batch 7"
    figures.receive(progress(14, 0, 0, epoch=3))
    assert place(figures.lead) == "epoch 4 · batch 0"


def test_ranks_are_summed_and_the_lowest_speaks() -> None:
    figures = Figures()
    for rank in (2, 0, 1):
        for second in (0, 1, 2):
            figures.receive(throughput(rank, second, second * 5, second * 160))
        figures.receive(Memory(rank=rank, time=0, process=(300 + 10 * rank) * MB))
        figures.receive(logged(rank, 1, loss=rank + 0.5))
    figures.tick(50.0)
    figures.tick(62.0)
    assert list(figures.ranks) == [0, 1, 2]
    assert " · ".join(figures.words()) == (
        "0:12 · step 10 · 5 steps/s · 480 samples/s · memory 300–320 MB per rank · loss 0.5"
    )


def test_device_memory_counts_before_the_process() -> None:
    figures = Figures()
    figures.receive(Memory(rank=0, time=0, process=900 * MB, allocated=100 * MB, reserved=200 * MB, peak=700 * MB))
    figures.receive(Memory(rank=0, time=1, process=900 * MB, allocated=100 * MB, reserved=150 * MB))
    assert (figures.lead.memory, figures.lead.peak) == (150 * MB, 700 * MB)


def test_a_metric_only_another_rank_logs_is_shown() -> None:
    figures = Figures()
    figures.receive(throughput(0, 1, 1, 1))
    figures.receive(logged(3, 1, accuracy=0.5))
    assert "accuracy 0.5" in figures.words()


def test_the_end_is_told_apart() -> None:
    figures = Figures()
    for rank in range(4):
        for second in (0, 9, 10):
            figures.receive(throughput(rank, second, second // 9 * 100, 0))
            figures.receive(progress(second, second, 20, rank=rank))
        figures.receive(RankState(rank=rank, time=0, state="running"))
    figures.receive(Finished(rank=0, time=0, steps=100))
    figures.receive(RankState(rank=0, time=0, state="idle"))
    figures.receive(failed(1))
    figures.receive(failed(2, "KeyboardInterrupt", interrupted=True))
    figures.close()
    assert [f.state for f in figures.ranks.values()] == ["done", "failed", "stopped", "ended"]
    assert "rank 1: failed ValueError" in figures.words()
    assert "10 steps/s" in figures.words()  # of the whole run, not of its last seconds
    assert not any("left" in word for word in figures.words())


# text


def lines_of(seconds: float, *, close: bool = True, name: str = "loss") -> list[tuple[float, str]]:
    """What is written in a run of so many seconds, with the second at which it was."""
    now = 1000.0
    lines: list[tuple[float, str]] = []
    view = TextView(lambda text: lines.append((round(now - 1000.0, 1), text)))
    view.opened("ddp · 1 rank · cpu")
    for tenth in range(int(seconds * 10) + 1):
        now = 1000.0 + tenth / 10
        view.receive(throughput(0, tenth / 10, tenth, tenth * 8))
        view.receive(logged(0, tenth, **{name: 1.0}))
        view.tick(now)
    if close:
        view.closed(True)
    return lines


def test_a_short_cell_writes_nothing() -> None:
    assert lines_of(1.9) == []


def test_lines_come_ever_more_rarely() -> None:
    written = lines_of(600)
    times = [time for time, _ in written]
    assert times[:3] == [2.0, 2.0, 7.0]
    pauses = [after - before for before, after in pairwise(times[1:-1])]
    assert pauses == sorted(pauses)
    assert max(pauses) <= 30.1
    assert written[0][1] == "ddp · 1 rank · cpu\n"
    assert written[1][1] == "0:02 · step 20 · 10 steps/s · 80 samples/s · loss 1\n"
    assert written[-1] == (600.0, "done · 10:00 · step 6,000 · 10 steps/s · 80 samples/s · loss 1\n")


def test_a_line_is_one_line() -> None:
    assert all(text.count("\n") == 1 and text.endswith("\n") for _, text in lines_of(10, name="a\nb\r"))


def test_a_failed_run_says_so() -> None:
    written: list[str] = []
    view = TextView(written.append)
    view.opened("x")
    view.tick(0)
    view.receive(failed(0))
    view.tick(3)
    view.closed(False)
    assert written[-1] == "ended early · 0:03 · rank 0: failed ValueError\n"


# html


class Checker(HTMLParser):
    """Every tag closed in order, none that the view does not use itself, the text that is left."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


class Page:
    """What a front end would hold: one bundle, replaced."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, bool]] = []
        self.bundle: Mapping[str, str] = {}

    def publish(self, bundle: Mapping[str, str], replace: bool) -> None:
        self.calls.append((self.now, replace))
        self.bundle = bundle

    def run(self, view: HtmlView, seconds: float, ranks: int = 2, name: str = "loss") -> None:
        view.opened("ddp · <2> ranks")
        for tenth in range(int(seconds * 10) + 1):
            self.now = tenth / 10
            for rank in range(ranks):
                view.receive(RankState(rank=rank, time=self.now, state="running"))
                view.receive(throughput(rank, self.now, tenth, tenth * 8))
                view.receive(Memory(rank=rank, time=self.now, process=(200 - tenth) * MB, peak=400 * MB))
                view.receive(progress(self.now, tenth, 100, rank=rank))
            view.receive(logged(0, tenth, **{name: 1 / (tenth + 1)}))
            view.tick(self.now)


def test_html_is_published_once_and_replaced_at_most_twice_a_second() -> None:
    page = Page()
    view = HtmlView(page.publish)
    page.run(view, 6)
    assert page.calls[0] == (2.0, False)
    assert all(replace for _, replace in page.calls[1:])
    assert len(page.calls) == 9
    view.closed(True)
    assert len(page.calls) == 10


def test_a_short_cell_publishes_nothing() -> None:
    page = Page()
    view = HtmlView(page.publish)
    page.run(view, 1.9)
    view.closed(False)
    assert page.calls == []


def test_html_says_it_all_and_so_does_its_text() -> None:
    page = Page()
    view = HtmlView(page.publish)
    page.run(view, 5)
    seen = Checker(page.bundle["text/html"])
    assert {"table", "svg", "polyline"} <= seen.tags
    for part in (
        "ddp · <2> ranks",
        "running",
        "150 MB, 400 MB",
        "epoch 1 · 50/100 · 50 % · 0:05 left",
        "0.01961",
        "160",
    ):
        assert part in seen.text
    plain = page.bundle["text/plain"].splitlines()
    assert plain[0] == "ddp · <2> ranks"
    assert plain[1].startswith("0:05 · step 50 · 10 steps/s · 160 samples/s · memory 150 MB per rank · loss 0.01961")
    view.receive(failed(1))
    view.closed(False)
    final = Checker(page.bundle["text/html"]).text
    assert "ended early" in final
    assert "failed ValueError" in final
    assert "left" not in final


def test_what_comes_from_the_user_is_escaped() -> None:
    evil = "</span><script>alert(1)</script>\"'&"
    page = Page()
    view = HtmlView(page.publish)
    page.run(view, 3, name=evil)
    view.receive(failed(0, "<img src=x onerror=alert(1)>"))
    view.closed(False)
    seen = Checker(page.bundle["text/html"])
    assert not {"script", "img"} & seen.tags
    assert evil in seen.text.replace("  ", " ")


def test_many_ranks_are_counted() -> None:
    page = Page()
    page.run(HtmlView(page.publish), 2.5, ranks=ROWS + 5)
    assert page.bundle["text/html"].count("<tr>") == 1 + ROWS + 1
    assert "and 5 more ranks" in page.bundle["text/html"]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0], [1e308, -1e308], [math.nan, math.inf], [5e-324, 0.0]])
def test_sparkline_draws_whatever_was_logged(values: list[float]) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    drawn = sparkline(curve)
    assert bool(drawn) == (len(curve.points) > 1)
    assert "nan" not in drawn.split("points=")[-1]
    assert "inf" not in drawn.split("points=")[-1]


# choosing


class Kernel:
    kernel = object()


class Terminal:
    pass


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("PAPERMILL_", "NBCLIENT_")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_choice(plain_environment: pytest.MonkeyPatch) -> None:
    assert type(choose("auto", Kernel())) is HtmlView
    assert type(choose("auto", Terminal())) is TextView
    assert type(choose("auto", None)) is TextView
    assert type(choose("text", Kernel())) is TextView
    assert type(choose("off", Kernel())) is NoView
    plain_environment.setenv("PAPERMILL_OUTPUT_PATH", "out.ipynb")
    assert type(choose("auto", Kernel())) is TextView
    assert type(choose("html", Kernel())) is HtmlView


def test_a_choice_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"unknown monitor 'bars'; there are: auto, html, text, off"):
        choose("bars", None)
    with pytest.raises(UsageError, match="write --monitor text"):
        choose("html", Terminal())


def test_text_goes_to_what_stdout_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    view = choose("text", None)
    view.opened("summary")
    view.receive(throughput(0, 0, 0, 0))
    view.tick(0)
    view.tick(2)
    view.closed(True)
    assert capsys.readouterr().out == "summary\n0:02\ndone · 0:02\n"


@pytest.mark.kernel
def test_in_a_kernel(kernel: Any) -> None:
    shown = kernel.run(
        """
from nbtrain.events import Throughput
from nbtrain.views import choose
view = choose("auto", get_ipython())
view.opened("ddp on two ranks")
for now in range(5):
    view.receive(Throughput(rank=0, time=now, seconds=now, steps=now, samples=now))
    view.tick(now)
view.closed(True)
print(type(view).__name__)
"""
    )
    assert shown.error is None
    assert shown.stdout == "HtmlView\n"
    (bundle,) = shown.displays
    assert "<table" in bundle["text/html"]
    assert bundle["text/plain"] == "ddp on two ranks\ndone · 0:04 · step 4 · 1 steps/s · 1 samples/s"
    assert len(shown.updates) == 3
