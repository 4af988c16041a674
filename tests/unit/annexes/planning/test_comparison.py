"""A comparison as it is read: the table in text and HTML, and the picture."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from statistics import mean
from typing import Any
from xml.etree import ElementTree

import pytest

from nbtrain.annexes.planning.compare.comparison import Comparison, picture
from nbtrain.annexes.planning.compare.measured_way import MeasuredWay

MB = 10**6


def done(name: str, memory: int, samples: float, **more: Any) -> MeasuredWay:
    found = {"line": f"--strategy {name} --devices 2", "state": "done", "ranks": 2, "steps": 10, "batch": 32}
    found |= {"paces": trials(samples)} | more
    return MeasuredWay(name=name, memory=(memory * MB - MB, memory * MB), samples_per_second=samples, **found)


def trials(pace: float, off: float = 0.01) -> tuple[float, ...]:
    return pace * (1 - off), pace, pace * (1 + off)


def sized(name: str, size: int, why: str) -> MeasuredWay:
    return done(name, 100 + size, 10.0 * size, size=size, batch=size, line=f"-s {name}", paces=(), why=why)


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
    rows=(
        sized("ddp", 48, "a batch of 52: out of memory"),
        sized("fsdp", 64, "a batch of 70: out of memory"),
        MeasuredWay(name="dp", line="-s dp", state="failed", ranks=2, no_memory=True),
    ),
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
    assert "use: %%distributed --strategy fsdp --devices 2" in shown
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


def test_the_largest_that_fits_of_each_strategy() -> None:
    lines = repr(BATCH).splitlines()
    assert lines[0].startswith("the largest batch of 3 ways")
    rows = [re.split(r"\s{2,}", line) for line in lines[4:7]]
    assert rows[0] == ["ddp", "48 per rank", "147–148 MB", "480", "a batch of 52: out of memory"]
    assert rows[1] == ["fsdp ★", "64 per rank", "163–164 MB", "640", "a batch of 70: out of memory"]
    assert rows[2] == ["dp", "none", "out of memory"]
    assert lines[-1] == "use: %%distributed -s fsdp with a batch of 64 per rank"
    drawn = said(drawing(BATCH))
    assert {"ddp · 48", "fsdp · 64 ★"} <= set(drawn)
    model = Comparison(rows=BATCH.rows, steps=5, goal="model", parameter="depth", over=True)
    assert repr(model).endswith("use: %%distributed -s fsdp with depth = 64")
    half = (
        replace(BATCH, over=False).with_row(0, state="running", why="trying a batch of 96").with_row(2, state="waiting")
    )
    lines = repr(half).splitlines()
    assert re.split(r"\s{2,}", lines[4]) == ["ddp", "● trying a batch of 96"]
    assert lines[6].endswith("… waiting")


@pytest.mark.parametrize(("paces", "best", "close"), [
    ({"ddp": trials(1000.0), "fsdp": trials(1060.0)}, "fsdp", []),
    ({"ddp": trials(1000.0), "fsdp": trials(1040.0)}, None, ["ddp", "fsdp"]),  # 1,000 ± 25 and 1,040 ± 26
    ({"ddp": trials(1000.0), "zero1": trials(1020.0), "fsdp": trials(500.0)}, None, ["ddp", "zero1"]),
    ({"ddp": trials(1000.0, 0.2), "fsdp": trials(1400.0)}, None, ["ddp", "fsdp"]),
    ({"ddp": (1000.0,), "fsdp": (1300.0,)}, None, ["ddp", "fsdp"]),  # stopped after one trial of each
    ({"ddp": (1000.0,), "fsdp": (4000.0,)}, "fsdp", []),
    ({"ddp": (1000.0,)}, "ddp", []),
])  # fmt: skip
def test_the_star_is_of_the_row_that_no_other_reaches(
    paces: dict[str, tuple[float, ...]], best: str | None, close: list[str]
) -> None:
    found = Comparison(
        rows=tuple(done(name, 99, mean(one), paces=one) for name, one in paces.items()), steps=10, over=True
    )
    assert (found.best.name if found.best is not None else None) == best
    assert [row.name for row in found.contenders] == (close or [best])
    assert ("★" in repr(found)) is (best is not None)
    assert ("too close to call" in found.data()["use"]) is bool(close)
    if close:
        assert found.data()["use"] == (
            f"too close to call: {' and '.join(close)}. Use either, or measure longer: --steps 40"
        )


def test_none_of_them_worked() -> None:
    failed = Comparison(rows=SPEED.rows[2:], steps=10, over=True)
    assert repr(failed).endswith("none of them worked")
    assert "none of them worked" in failed._repr_html_()
    assert "<img" not in failed._repr_html_()


def test_the_same_as_plain_data() -> None:
    found = json.loads(json.dumps(SPEED.data()))
    assert [row["best"] for row in found["rows"]] == [False, True, False, False]
    assert found["use"].startswith("use: %%distributed")
    assert found["table"][0][0] == "strategy"
    assert found["picture"].startswith("<svg")
    assert [row["line"] for row in json.loads(json.dumps(BATCH.data()))["rows"]] == ["-s ddp", "-s fsdp", "-s dp"]


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    texts = said(drawing(SPEED))
    assert {"ddp", "fsdp ★", "samples/s", "400 MB", "500 MB"} <= set(texts)
    drawn = picture(SPEED)
    assert "currentColor" in drawn
    for word in ("<script", "href", "url(", "<style", "http"):
        assert word not in drawn.replace("http://www.w3.org/2000/svg", "")
