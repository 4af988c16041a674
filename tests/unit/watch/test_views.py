"""The figures a run shows, as text and as HTML, and which of them is chosen where."""

from __future__ import annotations

import base64
import colorsys
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError
from itertools import count, pairwise
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import anywidget
import pytest
from comm.base_comm import BaseComm

import nbtrain.watch.views as views
from nbtrain.base.errors import UsageError
from nbtrain.base.events import (
    PHASES,
    Event,
    Failed,
    Finished,
    Memory,
    Metrics,
    Phases,
    Progress,
    RankState,
    Throughput,
)
from nbtrain.base.humanize import quantity, size
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.feed.run_statistics import METRICS, Figures
from nbtrain.watch.feed.training_progress import Rate
from nbtrain.watch.svg.base import BAD, COLOURS
from nbtrain.watch.views import NoView, choose, no_widget
from nbtrain.watch.views.base import BUNDLE, WIDGET, Controls, View, duration, metric, place, words
from nbtrain.watch.views.html import HtmlView
from nbtrain.watch.views.run_html import ROWS, TONES, page, picture
from nbtrain.watch.views.text import TextView
from nbtrain.watch.views.widget import WidgetView

MB, GB = 10**6, 10**9


def throughput(rank: int, seconds: float, steps: int, samples: int) -> Event:
    return Throughput(rank=rank, time=seconds, seconds=seconds, steps=steps, samples=samples)


def progress(seconds: float, done: int, total: int | None, epoch: int = 0, rank: int = 0) -> Event:
    return Progress(rank=rank, time=seconds, done=done, total=total, epoch=epoch)


def logged(rank: int, step: int, **values: float) -> Event:
    return Metrics(rank=rank, time=0.0, points={name: [(step, value)] for name, value in values.items()})


def failed(rank: int, name: str = "ValueError", interrupted: bool = False) -> Event:
    return Failed(rank=rank, time=0.0, name=name, text="", lines=(), exception=None, interrupted=interrupted)


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


def test_a_trainer_says_how_many_epochs_and_what_a_loader_is_for() -> None:
    lead = Figures().of(0)
    for stage, total, said in (
        ("", 40, "epoch 2 of 8 · 3/40 · 13 %"),
        ("", None, "epoch 2 of 8 · batch 3"),
        ("validation", 40, "epoch 2 of 8 · validation 3/40 · 7 %"),
        ("validation", None, "epoch 2 of 8 · validation batch 3"),
        ("test", 40, "test 3/40 · 7 %"),
        ("predict", None, "predict batch 3"),
    ):
        lead.training.last = Progress(rank=0, time=0.0, done=3, total=total, epoch=1, epochs=8, stage=stage)
        assert place(lead) == said


def test_ranks_are_summed_and_metrics_averaged() -> None:
    figures = Figures()
    for rank in (2, 0, 1):
        for second in (0, 1, 2):
            figures.receive(throughput(rank, second, second * 5, second * 160))
        figures.receive(Memory(rank=rank, time=0, process=(300 + 10 * rank) * MB))
        figures.receive(logged(rank, 1, loss=rank + 0.5))
    figures.tick(50.0)
    figures.tick(62.0)
    assert list(figures.ranks) == [0, 1, 2]
    assert " · ".join(words(figures)) == (
        "0:12 · step 10 · 5 steps/s · 480 samples/s · memory 300–320 MB per rank · loss 1.5"
    )


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
    figures.close(False)
    assert [f.state for f in figures.ranks.values()] == ["done", "failed", "stopped", "ended"]
    assert "rank 1: failed ValueError" in words(figures)
    assert "10 steps/s on average" in words(figures)  # of the whole run, not of its last seconds
    assert not any("left" in word for word in words(figures))


class Page:
    """What a front end would hold: lines, and one output that is replaced."""

    def __init__(self) -> None:
        self.now = 0.0
        self.above: Callable[[], None] | None = None
        self.lines: list[tuple[float, str]] = []
        self.calls: list[tuple[float, bool]] = []
        self.ids: set[str] = set()
        self.bundle: Mapping[str, Any] = {}
        self.feed = Feed({"devices": ["cpu", "cpu"]})

    def line(self, text: str) -> None:
        self.lines.append((round(self.now, 1), text + "\n"))

    def publish(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], transient: Mapping[str, Any], update: bool
    ) -> None:
        self.calls.append((self.now, update))
        self.ids.add(transient["display_id"])
        self.bundle = data

    def run(self, view: View, seconds: float, ranks: int = 2, name: str = "loss", ok: bool | None = None) -> None:
        for tenth in range(int(seconds * 10) + 1):
            self.now = tenth / 10
            for rank in range(ranks):
                self.feed.receive(RankState(rank=rank, time=self.now, state="running"))
                self.feed.receive(throughput(rank, self.now, tenth, tenth * 8))
                self.feed.receive(Memory(rank=rank, time=self.now, process=(200 - tenth) * MB, peak=400 * MB, limit=GB))
                self.feed.receive(progress(self.now, tenth, 100, rank=rank))
            self.feed.receive(logged(0, tenth, **{name: 1 / (tenth + 1)}))
            self.feed.tick(self.now)
            view.tick(self.now)
        if ok is not None:
            self.close(view, ok)

    def close(self, view: View, ok: bool) -> None:
        self.feed.closed(ok)
        view.closed(ok)


def lines_of(seconds: float, name: str = "loss") -> list[tuple[float, str]]:
    """What is written in a run of so many seconds, with the second at which it was."""
    front = Page()
    front.run(TextView(front.feed, None, front), seconds, ranks=1, name=name, ok=True)
    return front.lines


def test_lines_come_ever_more_rarely() -> None:
    written = lines_of(600)
    times = [time for time, _ in written]
    assert times[:2] == [2.0, 7.0]
    pauses = [after - before for before, after in pairwise(times[:-1])]
    assert pauses == sorted(pauses)
    assert max(pauses) <= 30.1
    assert written[0][1].startswith("0:02 · step 20 · 10 steps/s · 80 samples/s · memory 180 MB · loss 0.04762")
    assert written[-1][0] == 600.0
    assert written[-1][1].startswith("done · 10:00 · step 6,000 · 10 steps/s · 80 samples/s on average")


def test_a_line_is_one_line() -> None:
    assert all(text.count("\n") == 1 and text.endswith("\n") for _, text in lines_of(10, name="a\nb\r"))


def test_a_failed_run_says_so() -> None:
    front = Page()
    view = TextView(front.feed, None, front)
    for now in (0, 3):
        front.feed.tick(now)
        view.tick(now)
        front.feed.receive(failed(0))
    view.tick(9)
    front.close(view, False)
    assert front.lines[-1][1] == "failed · 0:03 · rank 0: failed ValueError\n"


class Checker(HTMLParser):
    """Every tag closed in order, none that the view does not use itself, the text that is left."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.images: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def drawing(source: str) -> ElementTree.Element:
    """Well-formed, and without a number that is none."""
    assert "nan" not in source
    assert "inf" not in source
    return ElementTree.fromstring(source)


def named(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_html_is_published_once_and_replaced_at_most_twice_a_second() -> None:
    front = Page()
    view = HtmlView(front.feed, None, front)
    front.run(view, 6)
    assert front.calls[0] == (2.0, False)
    assert all(update for _, update in front.calls[1:])
    assert len(front.calls) == 9
    front.close(view, True)
    assert len(front.calls) == 10
    assert len(front.ids) == 1


@pytest.fixture(autouse=True)
def quick_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes no time, however busy the machine is."""
    monkeypatch.setattr("nbtrain.watch.views.base.monotonic", lambda: 0.0)


@pytest.fixture
def slow_drawing(monkeypatch: pytest.MonkeyPatch, quick_drawing: None) -> float:
    """Every drawing takes so many seconds."""
    seconds = 0.3
    monkeypatch.setattr("nbtrain.watch.views.base.monotonic", count(step=seconds).__next__)
    return seconds


def test_html_that_is_slow_to_draw_leaves_the_time_to_the_run(slow_drawing: float) -> None:
    front = Page()
    front.run(HtmlView(front.feed, None, front), 20)
    times = [now for now, _ in front.calls]
    assert times[0] == 2.0
    pauses = [after - before - slow_drawing for before, after in pairwise(times)]
    assert all(10 * slow_drawing <= pause <= 11 * slow_drawing for pause in pauses)
    assert len(pauses) == 5


def test_memory_far_from_its_limit_is_measured_against_the_largest_rank() -> None:
    figures = Figures()
    for rank, memory in enumerate((100 * MB, 200 * MB)):
        figures.receive(Memory(rank=rank, time=0, process=memory, peak=memory, limit=25 * GB))
    assert re.findall(r"width:(\d+\.\d)%;background", page(figures, True)) == ["50.0", "100.0"]
    assert "of 25 GB" not in page(figures, True), "a bar that is full is not of the limit"
    figures.receive(Memory(rank=0, time=0, process=10 * GB, peak=10 * GB, limit=25 * GB))
    assert re.findall(r"width:(\d+\.\d)%;background", page(figures, True)) == ["40.0", "0.8"]
    assert page(figures, True).count("of 25 GB") == 2


def test_a_loss_that_is_not_a_number_stands_beside_done() -> None:
    front = Page()
    view = HtmlView(front.feed, None, front)
    front.run(view, 3)
    front.feed.receive(logged(1, 31, loss=math.nan))
    front.feed.receive(logged(1, 32, **{"<b>": math.inf}))
    front.close(view, True)
    html = front.bundle["text/html"]
    assert "⚠ loss is NaN: first at step 31, rank 1 ⚠ <b> is inf: first at step 32, rank 1" in Checker(html).text
    assert f'<span style="color:{TONES["good"]}">done' not in html
    assert "loss is NaN: first at step 31, rank 1" in front.bundle["text/plain"]


def test_html_says_it_all_and_so_does_its_text() -> None:
    front = Page()
    view = HtmlView(front.feed, None, front)
    front.run(view, 5)
    seen = Checker(front.bundle["text/html"])
    assert {"table", "svg", "polyline"} <= seen.tags
    for part in ("running", "150 MB, peak 400 MB of 1 GB", "epoch 1 · 50/100 · 50 % · 0:05 left", "0.01961", "160"):
        assert part in seen.text
    assert front.bundle["text/plain"].startswith(
        "0:05 · step 50 · 10 steps/s · 160 samples/s · memory 150 MB per rank · loss 0.01961"
    )
    front.feed.receive(failed(1))
    front.close(view, False)
    final = Checker(front.bundle["text/html"]).text
    assert "failed: ValueError" in final
    assert "left" not in final


def test_what_stays_needs_neither_styles_nor_scripts_nor_drawings() -> None:
    """GitHub takes them out. The charts are an image that is part of the page."""
    front = Page()
    front.run(HtmlView(front.feed, None, front), 5, ok=True)
    seen = Checker(front.bundle["text/html"])
    assert seen.tags == {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "i", "b", "img"}
    (source,) = seen.images
    kind, data = source.split(",")
    assert kind == "data:image/svg+xml;base64"
    assert len(named(drawing(base64.b64decode(data).decode()), "polyline")) == 3  # loss, speed and memory


def test_what_comes_from_the_user_is_escaped() -> None:
    evil = "</span><script>alert(1)</script>\"'&"
    front = Page()
    view = HtmlView(front.feed, None, front)
    front.run(view, 3, name=evil)
    seen = Checker(front.bundle["text/html"])
    assert "script" not in seen.tags
    assert evil[:23] in seen.text.replace("  ", " ")
    drawing(picture(front.feed.figures))
    front.feed.receive(failed(0, "<img src=x onerror=alert(1)>"))
    front.close(view, False)
    seen = Checker(front.bundle["text/html"])
    assert [source[:5] for source in seen.images] == ["data:"]


def test_many_ranks_are_counted() -> None:
    front = Page()
    front.run(HtmlView(front.feed, None, front), 2.5, ranks=ROWS + 5)
    assert front.bundle["text/html"].count("<tr>") == 1 + ROWS + 1
    assert "and 5 more ranks" in front.bundle["text/html"]
    assert len(named(drawing(picture(front.feed.figures)), "polyline")) == 3  # a mean of all of them
    assert f"mean of {ROWS + 5} ranks" in picture(front.feed.figures)


@pytest.mark.parametrize(
    ("values", "lines", "dots"),
    [([], 0, 0), ([1.0], 0, 1), ([1.0, 1.0], 1, 0), ([1e308, -1e308], 1, 0), ([math.nan, math.inf], 0, 0),
     ([5e-324, 0.0], 1, 0), ([1.0, 2.0, math.nan, 3.0], 1, 1)],
)  # fmt: skip
def test_charts_draw_whatever_was_logged(values: list[float], lines: int, dots: int) -> None:
    figures = Figures()
    for step, value in enumerate(values):
        figures.receive(logged(0, step, loss=value))
    drawn = picture(figures).replace("now inf", "now").replace("NaN and inf", "NaN")
    if not values:
        assert drawn == ""
        return
    assert (len(named(drawing(drawn), "polyline")), len(named(drawing(drawn), "circle"))) == (lines, dots)


def test_a_long_run_makes_a_small_picture_that_shows_its_spike() -> None:
    figures = Figures()
    for step in range(20_000):
        for rank in (0, 1):
            figures.receive(logged(rank, step, loss=50.0 if step == 7777 else 1.0, accuracy=step / 20_000))
    drawn = picture(figures)
    assert len(drawn) < 150_000
    assert len(named(drawing(drawn), "polygon")) == 2
    assert ">50<" in drawn


def texts(figures: Figures) -> list[str]:
    return [text.text or "" for text in named(drawing(picture(figures)), "text")]


def test_ranks_are_a_mean_in_a_band_with_the_words_of_the_dashboard() -> None:
    figures = Figures()
    for rank in range(64):
        figures.receive(Metrics(rank=rank, time=0, points={"loss": [(0, 64.0 - rank), (1, float(rank))]}))
    root = drawing(picture(figures))
    assert len(named(root, "polyline")) == len(named(root, "polygon")) == 1
    assert {"now 31.5 (0–63 across ranks)", "mean of 64 ranks", "lowest to highest"} <= set(texts(figures))
    figures.close(ok=True)
    assert "last 31.5 (0–63 across ranks)" in texts(figures)


def test_train_and_validation_share_a_chart() -> None:
    figures = Figures()
    for step in range(4):
        figures.receive(logged(0, step, loss=step + 1, val_loss=step + 2))
    assert [text for text in texts(figures) if "0" not in text] == [
        "loss", "train 4", "validation 5", "5", "1", "step 3",
    ]  # fmt: skip
    assert len(named(drawing(picture(figures)), "polyline")) == 2


def test_every_metric_is_drawn_and_what_is_not_kept_is_said() -> None:
    figures = Figures()
    for step in (0, 1):
        figures.receive(Metrics(rank=0, time=0, points={f"m{number}": [(step, 1.0)] for number in range(21)}))
    drawn = texts(figures)
    assert [f"m{number}" for number in range(21)] == [text for text in drawn if text.startswith("m")]
    assert not any("more metrics" in text for text in drawn)
    figures.receive(Metrics(rank=0, time=0, points={f"n{number}": [(0, 1.0)] for number in range(METRICS)}))
    assert "21 more metrics are in nbtrain.history()[-1].metrics" in texts(figures)


def test_what_is_not_finite_is_red_and_marked_where_it_came() -> None:
    figures = Figures()
    for step in range(9):
        for rank in (0, 1):
            figures.receive(logged(rank, step, loss=math.nan if rank == 1 and step >= 5 else 1.0))
    red = [text.text for text in named(drawing(picture(figures)), "text") if text.get("fill") == BAD]
    assert red == ["now NaN on rank 1, else 1", "NaN"]
    marks = [path for path in named(drawing(picture(figures)), "path") if path.get("fill") == BAD]
    assert len(marks) == 4


def test_saved_and_live_colours_are_the_same_hues_in_the_same_order() -> None:
    """Saved ones lie between those for light and those for dark ground: a picture does not know where it is seen."""
    theme = (Path(__file__).parents[3] / "js" / "src" / "theme.js").read_text()
    for name in ("LIGHT", "DARK"):
        live = re.findall(r"#\w{6}", re.search(rf"const {name} = \[(.*?)\]", theme, re.DOTALL)[1])
        assert len(live) == len(COLOURS)
        for one, other in zip(live, COLOURS, strict=True):
            apart = abs(hue(one) - hue(other))
            assert min(apart, 1 - apart) < 0.05, f"{one} is not {other}"


def hue(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return colorsys.rgb_to_hls(red, green, blue)[0]


def test_phases_are_drawn_to_scale() -> None:
    figures = Figures()
    for second in (0, 1, 2):
        spent = {"data": 0.3 * second, "forward": 0.1 * second}
        figures.receive(
            Phases(rank=0, time=second, steps=10 * second, seconds=tuple(spent.get(phase, 0.0) for phase in PHASES))
        )
    root = drawing(picture(figures))
    assert {"recent step", "40 ms", "data", "forward"} <= {text.text for text in named(root, "text")}
    bars = [float(bar.attrib["width"]) for bar in named(root, "rect") if bar.attrib["height"] == "10"]
    assert bars[0] == pytest.approx(3 * bars[1], rel=0.01)


class Shell:
    """A kernel's, as far as a view asks."""

    kernel = object()


class Terminal:
    pass


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A notebook's, with the front end."""
    for name in list(os.environ):
        if name.startswith(("PAPERMILL_", "NBCLIENT_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("nbtrain.machine.host.environment", lambda: "Jupyter")
    monkeypatch.setattr("nbtrain.watch.views.BUNDLE", tmp_path / "widget.js")
    (tmp_path / "widget.js").touch()
    monkeypatch.setattr("nbtrain.watch.views._said", set())
    views._unattended.cache_clear()
    yield monkeypatch
    views._unattended.cache_clear()


def chosen(monitor: str, shell: Any, screen: Page | None = None) -> type[View]:
    return type(choose(monitor, shell, Feed({}), None, screen or Page()))


def test_choice(plain_environment: pytest.MonkeyPatch) -> None:
    assert chosen("auto", Shell()) is WidgetView
    assert chosen("html", Shell()) is HtmlView
    assert chosen("auto", Terminal()) is TextView
    assert chosen("auto", None) is TextView
    assert chosen("text", Shell()) is TextView
    assert chosen("off", Shell()) is NoView
    plain_environment.setenv("PAPERMILL_OUTPUT_PATH", "out.ipynb")
    views._unattended.cache_clear()
    assert chosen("auto", Shell()) is TextView
    assert chosen("html", Shell()) is HtmlView
    assert chosen("widget", Shell()) is WidgetView


@pytest.mark.parametrize(("where", "bundle", "versions", "why"), [
    ("Databricks", True, {}, "Databricks shows no widgets of other packages"),
    ("Jupyter", False, {}, "this nbtrain was installed without its front end"),
    ("Kaggle", True, {"anywidget": None}, "widgets need anywidget and ipywidgets (No package metadata"),
    ("Jupyter", True, {"ipywidgets": "7.7.1"}, "widgets need ipywidgets 8, and here it is 7.7.1"),
    ("Colab", True, {"ipywidgets": "7.7.1"}, ""),
    ("VS Code", True, {}, ""),
])  # fmt: skip
def test_where_a_widget_is_not_seen_it_is_html(
    plain_environment: pytest.MonkeyPatch,
    tmp_path: Path,
    where: str,
    bundle: bool,
    versions: dict[str, str | None],
    why: str,
) -> None:
    def version(name: str) -> str:
        found = versions.get(name, "8.1")
        if found is None:
            raise PackageNotFoundError(name)
        return found

    plain_environment.setattr("nbtrain.machine.host.environment", lambda: where)
    plain_environment.setattr("nbtrain.watch.views._version", version)
    if not bundle:
        (tmp_path / "widget.js").unlink()
    assert no_widget().startswith(why)
    front = Page()
    assert chosen("auto", Shell(), front) is (HtmlView if why else WidgetView)
    assert front.lines == []
    for _ in range(2):
        chosen("widget", Shell(), front)
    assert len(front.lines) == bool(why)  # who asked for it is told, once
    assert all(text == f"nbtrain: {no_widget()}; plain HTML is shown instead\n" for _, text in front.lines)


def test_a_choice_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"unknown monitor 'bars'; there are: auto, widget, html, text, off"):
        chosen("bars", None)
    for monitor in ("html", "widget"):
        with pytest.raises(UsageError, match=f"--monitor {monitor} needs a notebook.*write --monitor text"):
            chosen(monitor, Terminal())


ANYWIDGET = anywidget.AnyWidget.class_traits()["_model_module_version"].default_value


class Comm(BaseComm):
    """What the kernel would have sent to the page."""

    sent: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def publish_msg(self, msg_type: str, data: Any = None, *rest: Any, **more: Any) -> None:
        self.sent.append((msg_type, data))

    def heard(self) -> list[dict[str, Any]]:
        """Since the last time."""
        taken = [self.sent.pop(0) for _ in range(len(self.sent))]
        return [data["content"] for _, data in taken if data and data.get("method") == "custom"]

    def say(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """What is answered at once."""
        self.sent.clear()
        self.handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        return self.heard()

    def ask(self, content: dict[str, Any]) -> dict[str, Any]:
        """What is answered, at once or later."""
        return next(iter(self.say(content)), None) or self.next()

    def next(self) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while not (found := self.heard()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found[0]


class Buttons:
    """Controls that remember what was asked of them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def do(self, command: str) -> tuple[bool, str]:
        self.done.append(command)
        return True, f"{command} is done"

    def earlier(self) -> list[dict[str, Any]]:
        return [{"number": 3, "title": "run 3"}]

    def curves(self, run: int) -> dict[str, dict[str, Any]]:
        return {f"loss of {run}": {}}


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr("comm.create_comm", Comm)
    monkeypatch.setattr(Comm, "sent", [])
    return Page()


def widget(front: Page, controls: Controls | None = None, at_once: bool = False) -> WidgetView:
    return WidgetView(front.feed, controls, front, at_once)


def test_the_widget_appears_after_a_while_and_a_picture_takes_its_place(front: Page) -> None:
    view = widget(front)
    front.run(view, 1.9)
    assert (front.calls, Comm.sent, view.comm_id) == ([], [], "")
    front.run(view, 3)
    assert front.calls == [(2.0, False)]
    assert set(front.bundle) == {WIDGET, "text/plain"}
    assert front.bundle[WIDGET]["model_id"] == view.comm_id
    (opened,) = (data["state"] for kind, data in Comm.sent if kind == "comm_open" and "_esm" in data["state"])
    assert (opened["_model_module_version"], opened["_view_module_version"]) == ("*", "*")
    assert opened["_esm"] == BUNDLE.read_text()
    assert opened["start"]["kind"] == "all"
    front.close(view, True)
    assert front.calls[1:] == [(3.0, True)]
    assert len(front.ids) == 1
    assert set(front.bundle) == {"text/html", "text/plain"}
    assert view._widget._feed._callbacks == []
    kinds = [kind for kind, _ in Comm.sent]
    assert (kinds.count("comm_open"), kinds.count("comm_close")) == (2, 0)  # its layout is a widget too
    assert view._widget.comm.say({"kind": "hello"})[0]["ended"] == {"how": "done", "text": ""}
    front.run(widget(front, at_once=True), 0)  # the next run's
    assert [kind for kind, _ in Comm.sent if kind.startswith("comm_")] == ["comm_close"] * 2 + ["comm_open"] * 2


def test_a_widget_that_cannot_be_made_is_html(front: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ImportError("ipywidgets are too old")

    monkeypatch.setattr("nbtrain.watch.views.dashboard_widget.DashboardWidget", fails)
    front.run(widget(front), 4, ok=True)
    said = "nbtrain: no widget (ImportError: ipywidgets are too old); plain HTML is shown instead\n"
    assert front.lines == [(2.0, said)]
    assert [now for now, _ in front.calls] == [2.5, 3.0, 3.5, 4.0, 4.0]
    assert "<img" in front.bundle["text/html"]


def test_a_page_that_comes_late_is_told_everything(front: Page) -> None:
    """It need not have heard any of the messages before, and on a busy kernel cannot ask."""
    view = widget(front)
    front.run(view, 20)
    updates = [data["state"]["start"] for _, data in Comm.sent if data.get("method") == "update"]
    assert [everything["now"] for everything in updates] == [2.5, 4.5, 10.5]
    news = [message for message in view._widget.comm.heard() if message["seq"] == updates[-1]["seq"] + 1]
    assert len(news) == 1
    assert view._widget.get_state()["start"]["now"] == 20


def test_a_page_that_says_hello_is_answered_and_not_told_again(front: Page) -> None:
    view = widget(front)
    front.run(view, 2.2)
    (answer,) = view._widget.comm.say({"kind": "hello"})
    assert (answer["kind"], answer["ranks"][1]["step"]) == ("all", 22)
    front.run(view, 10)
    assert not [data for _, data in Comm.sent if data.get("method") == "update"]


@pytest.mark.parametrize(("where", "version"), [("Jupyter", "*"), ("Colab", ANYWIDGET), ("VS Code", ANYWIDGET)])
def test_which_anywidget_the_page_takes(front: Page, monkeypatch: pytest.MonkeyPatch, where: str, version: str) -> None:
    monkeypatch.setattr("nbtrain.machine.host.environment", lambda: where)
    view = widget(front, at_once=True)
    front.run(view, 0)
    assert (view._widget._model_module_version, view._widget._view_module_version) == (version, version)


def test_the_page_is_told_of_earlier_runs_and_their_curves(front: Page) -> None:
    view = widget(front, Buttons(), at_once=True)
    front.run(view, 0)
    comm = view._widget.comm
    assert comm.ask({"kind": "earlier"}) == {"kind": "earlier", "runs": [{"number": 3, "title": "run 3"}]}
    assert comm.ask({"kind": "compare", "run": 3}) == {
        "kind": "compared", "run": 3, "title": "run 3", "curves": {"loss of 3": {}}
    }  # fmt: skip
    assert comm.say({"kind": "compare", "run": "/etc/passwd"}) == []
    front.run(other := widget(front, at_once=True), 0)
    assert other._widget.comm.ask({"kind": "earlier"}) == {"kind": "earlier", "runs": []}


def test_nothing_waits_until_earlier_runs_are_read(front: Page) -> None:
    goes_on = threading.Event()

    class Slow(Buttons):
        def earlier(self) -> list[dict[str, Any]]:
            assert goes_on.wait(20)
            return super().earlier()

    view = widget(front, Slow(), at_once=True)
    front.run(view, 0)
    comm = view._widget.comm
    assert comm.say({"kind": "earlier"}) == []
    (answer,) = comm.say({"kind": "command", "id": "1", "command": "stop"})
    assert answer["text"] == "stop is done"
    goes_on.set()
    assert comm.next()["kind"] == "earlier"


def test_buttons(front: Page) -> None:
    buttons = Buttons()
    view = widget(front, buttons)
    front.run(view, 3)
    page = view._widget.comm
    for _ in range(2):  # a page that is not sure asks once more
        assert page.say({"kind": "command", "id": "7", "command": "stop"}) == [
            {"kind": "ack", "id": "7", "command": "stop", "ok": True, "text": "stop is done"}
        ]
    page.say({"kind": "command", "id": "8", "command": "kill"})
    assert buttons.done == ["stop", "kill"]
    assert page.say({"kind": "news"}) == []
    page.handle_msg({"content": {"data": {"method": "custom", "content": "?"}}, "buffers": []})
    without = widget(front)
    front.run(without, 3)
    assert without._widget.comm.say({"kind": "command", "id": "9", "command": "stop"})[0]["ok"] is False


def test_ipykernels_choice_of_thread_is_undone(front: Page) -> None:
    """7.4 would let the page wait for the thread that sent last, which the cell keeps busy."""

    class Kernels(Comm):
        def _reply_subshell_for(self, data: Any, default: Any) -> Any:
            return "the shell that sent last"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("comm.create_comm", Kernels)
        view = widget(front)
        front.run(view, 3)
    assert view._widget.comm._reply_subshell_for({}, "the page's own") == "the page's own"
