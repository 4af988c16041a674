"""A comparison as it is read: the table in text and HTML, and the picture."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from statistics import mean
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbtrain.humanize import size
from nbtrain.planning.compare.comparison import STATES, Comparison, MeasuredWay
from nbtrain.planning.compare.comparison_table import html
from nbtrain.svg import ticks

MB = 10**6


def done(name: str, memory: int, samples: float, **more: Any) -> MeasuredWay:
    found = {"line": f"--strategy {name} --devices 2", "state": "done", "ranks": 2, "steps": 10, "batch": 32}
    found |= {"paces": trials(samples)} | more
    return MeasuredWay(name=name, memory=(memory * MB - MB, memory * MB), samples_per_second=samples, **found)


def trials(pace: float, off: float = 0.01) -> tuple[float, ...]:
    return pace * (1 - off), pace, pace * (1 + off)


def sized(name: str, *sizes: int, fits: int) -> list[MeasuredWay]:
    failed: dict[str, Any] = {"state": "failed", "no_memory": True, "memory": (), "samples_per_second": 0.0}
    rows = [
        done(f"{name} · batch {one}", 100 + one, 10.0 * one, size=one, batch=one, line=f"-s {name}", paces=())
        for one in sizes
    ]
    return [row if (row.size or 0) <= fits else replace(row, **failed) for row in rows]


SPEED = Comparison(
    rows=(
        done("ddp", 812, 401.2),
        done("fsdp", 412, 435.6),
        MeasuredWay(name="pipeline", line="-s pipeline", state="failed", ranks=2, why="it wants a <list> of layers"),
        MeasuredWay(name="dp", line="-s dp", state="failed", ranks=2, memory=(990 * MB,), no_memory=True),
    ),
    steps=10,
    seconds=14.2,
    over=True,
)
BATCH = Comparison(
    rows=(*sized("ddp", 32, 64, 48, fits=50), *sized("fsdp", 32, 64, 128, fits=100), *sized("dp", 32, fits=0)),
    steps=5,
    goal="batch",
    over=True,
)
GOING = (
    replace(SPEED, over=False)
    .with_row(2, state="waiting", why="")
    .with_row(1, state="running", memory=(), samples_per_second=0.0, paces=())
)


def drawing(found: Comparison) -> ElementTree.Element:
    """The picture that is shown in the end."""
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', found._repr_html_())
    assert image is not None
    return ElementTree.fromstring(base64.b64decode(image[1]))


def said(drawn: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in drawn.iter() if one.tag.endswith("text")]


def test_the_table_says_what_was_measured_what_failed_and_what_to_type() -> None:
    lines = repr(SPEED).splitlines()
    assert lines[0] == "4 ways · 3 × 10 steps of each · 14.2 s in all"
    assert lines[2].split("  ")[0] == "strategy"
    rows = {line.split(" ")[0]: re.split(r"\s{2,}", line) for line in lines[4:-2]}
    assert rows["ddp"] == ["ddp", "811–812 MB", "401 ± 10", "32"]
    assert rows["fsdp"][0] == "fsdp ★"
    assert rows["pipeline"] == ["pipeline", "it wants a <list> of layers"]
    assert rows["dp"] == ["dp", "990 MB", "out of memory"]
    assert lines[-1] == "use: %%distributed --strategy fsdp --devices 2"
    shown = SPEED._repr_html_()
    assert "<code>%%distributed --strategy fsdp --devices 2</code>" in shown
    assert "&lt;list&gt;" in shown
    assert "<list>" not in shown


def test_it_shows_how_far_it_is() -> None:
    text = repr(GOING)
    assert "2 to come" in text
    assert re.search(r"^fsdp .*● running$", text, re.M)
    assert re.search(r"^pipeline .*… waiting$", text, re.M)
    assert "★" not in text  # the last one may be the best
    assert "use:" not in text
    between = replace(SPEED, over=False)
    assert "★" not in repr(between), "another round may follow"
    assert between.data()["use"] == ""
    again = replace(SPEED, over=False).with_row(0, state="waiting").with_row(1, state="running")
    assert repr(again).startswith("4 ways · 10 steps of each · round 4\n")
    assert re.search(r"^ddp +811–812 MB +401 ± 10 +32 +… waiting$", repr(again), re.M), "what is known stays"
    assert "ddp" in said(drawing(again))
    assert "nothing measured yet" in repr(Comparison.of([("ddp", "-s ddp")], steps=3))


def test_steps_where_nobody_knows_samples() -> None:
    rows = [
        done(name, 100, 0.0, steps_per_second=pace, batch=0, paces=trials(pace))
        for name, pace in (("ddp", 2.5), ("fsdp", 3600.0))
    ]
    lines = repr(Comparison(rows=tuple(rows), steps=1, over=True)).splitlines()
    assert re.split(r"\s{2,}", lines[2]) == ["strategy", "memory per rank", "steps/s"]
    assert lines[5].startswith("fsdp ★")
    assert lines[5].endswith("3,600 ± 89")
    assert "steps/s" in said(drawing(Comparison(rows=tuple(rows), steps=1, over=True)))


def test_the_largest_that_fits_of_each_strategy() -> None:
    lines = repr(BATCH).splitlines()
    assert lines[0].startswith("the largest batch of 3 ways")
    rows = [re.split(r"\s{2,}", line) for line in lines[4:7]]
    assert rows[0] == ["ddp", "48 per rank", "147–148 MB", "480", "32, 48 · 64: out of memory"]
    assert rows[1] == ["fsdp ★", "64 per rank", "163–164 MB", "640", "32, 64 · 128: out of memory"]
    assert rows[2] == ["dp", "none", "out of memory"]
    assert lines[-1] == "use: %%distributed -s fsdp with a batch of 64 per rank"
    drawn = said(drawing(BATCH))
    assert {"ddp · 48", "fsdp · 64 ★", "dp"} <= set(drawn)
    model = Comparison(rows=BATCH.rows, steps=5, goal="model", parameter="depth", over=True)
    assert repr(model).endswith("use: %%distributed -s fsdp with depth = 64")
    half = replace(BATCH, over=False).with_row(2, state="running").with_row(6, state="waiting", no_memory=False)
    lines = repr(half).splitlines()
    assert lines[4].endswith("32 · 64: out of memory · ● 48")
    assert lines[6].endswith("… waiting")


def test_one_row_for_each_strategy_says_what_was_too_much() -> None:
    rows = (
        done("ddp", 300, 480.0, size=48, paces=(), why="a batch of 64: out of memory: it took 1.1 GB"),
        MeasuredWay(name="fsdp", line="-s fsdp", state="running", ranks=2, size=32, why="trying a batch of 32"),
        MeasuredWay(name="dp", line="-s dp", state="failed", ranks=2, why="a batch of 8: stopped"),
        MeasuredWay(name="zero1", line="-s zero1"),
    )
    lines = repr(Comparison(rows=rows, steps=5, goal="batch")).splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines[4:]]
    assert cells[0][:4] == ["ddp", "48 per rank", "299–300 MB", "480"]
    assert cells[0][4].startswith("a batch of 64: out of memory")
    assert ["fsdp", "● trying a batch of 32"] in cells
    assert ["dp", "none", "a batch of 8: stopped"] in cells
    assert ["zero1", "… waiting"] in cells
    named = replace(rows[0], size="large")  # type: ignore[arg-type]
    model = Comparison(rows=(named,), steps=5, goal="model", parameter="kind", over=True)
    assert repr(model).endswith("use: %%distributed --strategy ddp --devices 2 with kind = 'large'")


@pytest.mark.parametrize(
    ("paces", "best", "close"),
    [
        ({"ddp": trials(1000.0), "fsdp": trials(1060.0)}, "fsdp", []),
        ({"ddp": trials(1000.0), "fsdp": trials(1040.0)}, None, ["ddp", "fsdp"]),  # 1,000 ± 25 and 1,040 ± 26
        ({"ddp": trials(1000.0), "zero1": trials(1020.0), "fsdp": trials(500.0)}, None, ["ddp", "zero1"]),
        ({"ddp": trials(1000.0, 0.2), "fsdp": trials(1400.0)}, None, ["ddp", "fsdp"]),
        ({"ddp": (1000.0,), "fsdp": (1300.0,)}, None, ["ddp", "fsdp"]),  # stopped after one trial of each
        ({"ddp": (1000.0,), "fsdp": (4000.0,)}, "fsdp", []),
        ({"ddp": (1000.0,)}, "ddp", []),
    ],
)
def test_the_star_is_of_the_row_that_no_other_reaches(
    paces: dict[str, tuple[float, ...]], best: str | None, close: list[str]
) -> None:
    found = Comparison(
        rows=tuple(done(name, 99, mean(one), paces=one) for name, one in paces.items()), steps=10, over=True
    )
    assert (found.best.name if found.best is not None else None, found.data()["close"]) == (best, close)
    assert ("★" in repr(found)) is (best is not None)
    assert ("too close to call" in found.data()["use"]) is bool(close)
    if close:
        assert found.data()["use"] == (
            f"too close to call: {' and '.join(close)}. Use either, or measure longer: --steps 40"
        )
        assert found.data()["line"] == ""


def test_of_three_that_are_too_close_to_call_any_will_do() -> None:
    three = tuple(done(name, 99, 1000.0, paces=trials(1000.0)) for name in ("ddp", "zero1", "fsdp"))
    assert Comparison(rows=three, steps=10, over=True).data()["use"] == (
        "too close to call: ddp, zero1 and fsdp. Use any of them, or measure longer: --steps 40"
    )
    rows = (*sized("ddp", 64, fits=64), *sized("fsdp", 64, fits=64), *sized("dp", 64, fits=64))
    equal = Comparison(rows=rows, steps=5, goal="batch", over=True)
    assert repr(equal).endswith("too close to call: ddp, fsdp and dp take the same size. Use any of them.")


def test_of_equal_sizes_none_is_the_best_without_more_trials() -> None:
    rows = (*sized("ddp", 64, fits=64), *sized("fsdp", 64, fits=64), *sized("dp", 32, fits=32))
    found = Comparison(rows=rows, steps=5, goal="batch", over=True)
    assert repr(found).endswith("too close to call: ddp and fsdp take the same size. Use either.")
    slow = tuple(replace(row, samples_per_second=row.samples_per_second / 2) for row in rows[1:2])
    found = Comparison(rows=(rows[0], *slow, rows[2]), steps=5, goal="batch", over=True)
    assert repr(found).endswith("use: %%distributed -s ddp with a batch of 64 per rank")


def test_the_picture_shows_the_spread() -> None:
    drawn = drawing(SPEED)
    bars = [one for one in drawn.iter() if one.tag.endswith("path") and one.get("stroke-width") == "1.5"]
    assert len(bars) == 2


def test_none_of_them_worked() -> None:
    failed = Comparison(rows=SPEED.rows[2:], steps=10, over=True)
    assert repr(failed).endswith("none of them worked")
    assert "none of them worked" in failed._repr_html_()
    assert "<img" not in failed._repr_html_()


def test_the_same_as_plain_data() -> None:
    found = json.loads(json.dumps(SPEED.data()))
    assert [row["best"] for row in found["rows"]] == [False, True, False, False]
    assert found["rows"][0]["memory"] == [811 * MB, 812 * MB]
    assert found["rows"][0]["peak"] == 812 * MB
    assert found["line"] == "--strategy fsdp --devices 2"
    assert found["use"].startswith("use: %%distributed")
    assert found["table"][0][0] == "strategy"
    assert found["picture"].startswith("<svg")
    assert json.loads(json.dumps(BATCH.data()))["rows"][2]["size"] == 48


def test_the_picture_needs_nothing_from_elsewhere_and_names_what_failed() -> None:
    texts = said(drawing(SPEED))
    assert {"ddp", "fsdp ★", "pipeline", "dp", "samples/s", "400 MB", "500 MB"} <= set(texts)
    assert any("list> of layers" in text for text in texts)
    drawn = html(SPEED.data(), saved=False)
    assert "currentColor" in drawn
    for word in ("<script", "href", "url(", "<style", "http"):
        assert word not in drawn.replace("http://www.w3.org/2000/svg", "").replace("<style>\n.nbt-table", "")


class Page(HTMLParser):
    """What a browser reads: the tags, and what stands in <code>."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.code: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if self.get_starttag_text() == "<code>":
            self.code.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "code":
            self.code[-1] += data


text = st.text(max_size=60)
amount = st.one_of(st.just(0), st.integers(1, 10**15))
pace = st.floats(0, 1e12) | st.sampled_from([float("inf"), float("nan")])
row = st.builds(
    MeasuredWay, name=text, line=text, state=st.sampled_from(STATES), ranks=st.integers(0, 600), why=text, batch=amount,
    memory=st.lists(amount, max_size=4).map(tuple), samples_per_second=pace, steps_per_second=pace,
    paces=st.lists(pace, max_size=3).map(tuple),
    size=st.none() | st.integers(0, 10**9), no_memory=st.booleans(),
)  # fmt: skip
anything = st.builds(
    Comparison, rows=st.lists(row, max_size=8).map(tuple), steps=st.integers(0, 100), parameter=text,
    goal=st.sampled_from(["speed", "batch", "model"]), seconds=st.floats(0, 1e6), over=st.booleans(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(anything)
@example(
    Comparison(
        rows=(MeasuredWay(name="a", line="", state="done", memory=(1,), steps_per_second=5e-324),),
        steps=1,
        goal="speed",
    )
)
def test_whatever_was_measured_can_be_shown(found: Comparison) -> None:
    repr(found)
    shown = found._repr_html_()
    if picture := found.data()["picture"]:
        ElementTree.fromstring(picture)
        assert "<img" in shown
    page = Page()
    page.feed(shown)
    page.close()
    lines = {code for code in page.code if code.startswith("%%distributed")}
    assert {code.removesuffix(" ★") for code in page.code if code not in lines} <= {one.name for one in found.rows}
    assert page.tags <= {"style", "div", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "span", "img"}


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-3, 1e14), st.floats(1.2, 1e6))
def test_axes_have_round_numbers(low: float, times: float) -> None:
    found = ticks(low, low * times)
    assert found[0] <= low * (1 + 1e-6)
    assert found[-1] >= low * times * (1 - 1e-6)
    assert 2 <= len(found) <= 8
    assert all(float(f"{value:.2g}") == pytest.approx(value) for value in (found[1] - found[0],))
    if low > 1000:
        words = [size(value) for value in found]
        assert len(set(words)) == len(words)
