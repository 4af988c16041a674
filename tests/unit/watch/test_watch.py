"""What is known of a run: curves in bounded memory, what each rank is doing, and the messages about it."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

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
    Use,
)
from nbtrain.watch.feed.across_ranks import AcrossRanks, latest
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.feed.metric_charts import split_of
from nbtrain.watch.feed.run_statistics import BUCKETS, LINE, METRICS, Figures, RankFigures
from nbtrain.watch.feed.series import INF, LIMIT, Series, number, points
from nbtrain.watch.feed.series import NAN as NAN_BIT
from nbtrain.watch.views.base import place

MB = 10**6
NAN = math.nan
SHARED = Path(__file__).parents[3] / "js" / "test"
"""cases that the dashboard's tests read, too"""


def logged(rank: int, step: int, **values: float) -> Event:
    return Metrics(rank=rank, time=0.0, points={name: [(step, value)] for name, value in values.items()})


def speed(rank: int, seconds: float, steps: int, samples: int = 0, operations: float = 0.0) -> Event:
    return Throughput(
        rank=rank, time=1000 + seconds, steps=steps, samples=samples, seconds=seconds,
        operations=operations, fastest=4e12,
    )  # fmt: skip


def phases(seconds: float, steps: int, now: str = "", within: str = "", **spent: float) -> Event:
    each = tuple(spent.get(phase, 0.0) for phase in PHASES)
    return Phases(rank=0, time=1000 + seconds, steps=steps, seconds=each, now=now, within=within)


def state(name: str, rank: int = 0, *notes: str) -> Event:
    return RankState(rank=rank, time=1000, state=name, notes=notes)


def figures_of(*events: Event) -> Figures:
    figures = Figures(1000.0, ("cpu", "cuda:1"))
    for event in events:
        figures.receive(event)
    return figures


# curves


def test_a_curve_keeps_every_point_while_it_can() -> None:
    series = Series()
    for x in range(LIMIT - 1):
        series.add(x, x * 0.5)
    assert series.width == 1
    assert list(series.x) == list(range(LIMIT - 1))
    assert series.low == series.high
    series.add(LIMIT - 1, 7.0)
    assert (len(series), series.width, series.count, series.last) == (LIMIT // 2, 2, LIMIT, 7.0)


def test_a_long_curve_stays_small_and_loses_no_extreme() -> None:
    generator = random.Random(1)
    values = [generator.random() for _ in range(300_000)]
    values[123_456], values[234_567] = 9.0, -9.0
    series = Series()
    for x, y in enumerate(values):
        series.add(x, y)
    assert LIMIT // 2 <= len(series) < LIMIT
    for at, (begin, low, high) in enumerate(series.buckets()):
        assert begin == at * series.width
        part = values[int(begin) : int(begin) + series.width]
        assert (low, high) == (min(part), max(part))
    assert (series.count, series.last) == (300_000, values[-1])


def test_what_is_not_finite_is_a_gap() -> None:
    series = Series(limit=4)
    for x, y in enumerate((1.0, NAN, math.inf)):
        series.add(x, y)
    assert list(series.buckets()) == [(0, 1.0, 1.0)]
    assert series.message() == {
        "x": [0, 1, 2], "low": [1, None, None], "high": [1, None, None], "last": "Infinity", "count": 3, "width": 1,
        "bad": [0, 1, 2],
    }  # fmt: skip
    series.add(3, 5.0)
    assert list(series.buckets()) == [(0, 1.0, 1.0), (2, 5.0, 5.0)]  # a gap goes when something is beside it


@pytest.mark.parametrize("count", [1, 2, 30, 31, 32, 1000])
def test_many_points_become_few_with_the_same_extremes_and_end(count: int) -> None:
    generator = random.Random(count)
    values = [generator.gauss(0, 1) for _ in range(count)]
    whole, few = Series(), Series(limit=32)
    for x, y in enumerate(values):
        whole.add(x, y)
        few.add(x, y)
    xs, ys = points(few)
    again = Series()
    for x, y in zip(xs, ys, strict=True):
        again.add(float(x or 0), float(y))
    assert len(ys) <= 64
    assert (min(again.low), max(again.high)) == (number(min(values)), number(max(values)))
    assert again.last == number(values[-1])
    assert xs == sorted(x for x in xs if x is not None)


def test_numbers_are_short_and_finite() -> None:
    assert [number(v) for v in (0.1 + 0.2, 3.0, 1e300, NAN, -math.inf, 123456789.123, None)] == [
        0.3, 3, 1e300, None, None, 123456789, None,
    ]  # fmt: skip
    assert isinstance(number(3.0), int)


# ranks as one curve


def curve(*values: float) -> Series:
    series = Series()
    series.extend(list(enumerate(values)))
    return series


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case["what"]) for case in json.loads((SHARED / "across.json").read_text())]
)
def test_ranks_as_one_curve(case: dict[str, Any]) -> None:
    ranks = [Series() for _ in case["curves"]]
    for series, (xs, ys) in zip(ranks, case["curves"], strict=True):
        series.extend([(x, float(y)) for x, y in zip(xs, ys, strict=True)])
    found = AcrossRanks(ranks).at_most(LIMIT)
    assert list(found.x) == case["x"]
    lines = {"mean": found.middle, "low": found.low, "high": found.high}
    for name, line in lines.items():
        assert [None if y != y else y for y in line] == pytest.approx(case[name]), name


def test_a_value_that_is_not_finite_is_known_where_it_came() -> None:
    found = AcrossRanks([curve(1, NAN, 3), curve(1, 2, math.inf)]).at_most(100)
    assert list(found.bad) == [0, NAN_BIT, INF]
    assert found.middle == [1, 2, 3]
    now = latest({0: curve(1, 5), 3: curve(1, NAN), 4: Series()})
    assert (now.ranks, now.mean, list(now.broken)) == (2, 5, [3])
    assert AcrossRanks([]).at_most(10).x == []


def test_what_is_said_of_the_ranks_is_of_the_last_step_that_all_have() -> None:
    assert latest({0: curve(3, 2, 1), 1: curve(3, 2)}).finite == [2, 2]
    now = latest({0: curve(3, -math.inf, 1), 1: curve(3, 2)})
    assert (now.finite, now.broken) == ([2], {0: -math.inf})
    assert latest({0: curve(*range(100)), 1: curve(7)}).finite == [99, 7], "one that is far behind has its last value"
    low, high = latest({0: curve(*range(5001)), 1: curve(*range(5000))}).finite
    assert low == high


@pytest.mark.parametrize(("name", "base", "kind"), json.loads((SHARED / "metric_names.json").read_text()))
def test_the_name_of_a_metric_says_what_it_is_of(name: str, base: str, kind: str) -> None:
    assert split_of(name) == (base, kind)


# what a rank does


def test_a_row_says_everything() -> None:
    figures = figures_of(
        state("running", 1),
        speed(1, 1, 10, 320),
        speed(1, 2, 20, 640),
        Memory(
            rank=1, time=1002, process=900 * MB, allocated=100 * MB, reserved=200 * MB, peak=700 * MB,
            limit=80_000 * MB, retries=2,
        ),
        Use(rank=1, time=1002, processor=1.50000001, card=0.83),
    )  # fmt: skip
    figures.ranks[1].printed("loss 3\n")
    assert figures.ranks[1].row() == {
        "rank": 1, "device": "cuda:1", "state": "running", "detail": "", "tone": "busy", "ended": False, "step": 20,
        "rate": 320, "memory": 200 * MB, "peak": 700 * MB, "limit": 80_000 * MB, "process": 900 * MB,
        "allocated": 100 * MB, "reserved": 200 * MB, "retries": 2, "use": 1.5, "card": 0.83, "line": "loss 3",
    }  # fmt: skip
    assert figures_of(state("starting")).lead.row()["memory"] is None


def test_a_rank_that_waits_for_long_says_for_what() -> None:
    figures = figures_of(state("running"), phases(1, 5, "data"), phases(1.5, 5, "data"))
    assert figures.lead.words == "running"
    figures.receive(phases(2, 5, "data"))
    assert (figures.lead.words, figures.lead.tone) == ("waiting for data", "wait")
    figures.receive(phases(2.5, 6, "data"))
    assert figures.lead.words == "running"
    for second in (3, 4):
        figures.receive(phases(second, 7, "communication", "in all_reduce of 1,024"))
    assert (figures.lead.words, figures.lead.tone) == ("in all_reduce of 1,024", "wait")
    for second in (5, 6):
        figures.receive(phases(second, 8, "forward"))
    assert (figures.lead.words, figures.lead.tone) == ("running", "busy")
    figures.receive(Finished(rank=0, time=1007, steps=8))
    assert (figures.lead.words, figures.lead.tone) == ("done", "good")


def test_a_rank_that_died_stays_dead() -> None:
    figures = figures_of(state("running"), state("dead", 0, "killed by signal 9"), state("idle"))
    assert (figures.lead.words, figures.lead.note, figures.lead.tone) == ("dead", "killed by signal 9", "bad")
    figures.close(False)
    assert figures.ending == "failed"


@pytest.mark.parametrize(("name", "text", "shown"), [
    ("RuntimeError", "[gloo] Connection closed by peer [::1]:5", ("stopped", "rank 1 died", "quiet")),
    ("HorovodInternalError", "shut down", ("stopped", "rank 1 died", "quiet")),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", ("failed", "RuntimeError", "bad")),
    ("KeyError", "'x'", ("failed", "KeyError", "bad")),
])  # fmt: skip
@pytest.mark.parametrize("first", ["the death", "the error"])
def test_a_rank_whose_collective_failed_as_another_died(
    first: str, name: str, text: str, shown: tuple[str, str, str]
) -> None:
    events = [Failed(rank=0, time=1001, name=name, text=text, lines=()), state("dead", 1, "signal 9")]
    figures = figures_of(state("running"), state("running", 1), *(events[::-1] if first == "the death" else events))
    assert (figures.lead.words, figures.lead.note, figures.lead.tone) == shown
    figures.close(False)
    assert figures.ending == "failed"


@pytest.mark.parametrize(("ok", "how"), [(True, "done"), (False, "stopped")])
def test_how_a_run_ended(ok: bool, how: str) -> None:
    stopped = Failed(rank=0, time=0, name="KeyboardInterrupt", text="", lines=(), interrupted=True)
    figures = figures_of(stopped, Finished(rank=0, time=1, steps=7))  # with what it has done until then
    assert (figures.lead.words, figures.lead.steps) == ("stopped", 7)
    figures.close(ok)
    assert figures.ending == how


def test_a_run_that_the_user_has_killed_is_not_one_that_was_stopped() -> None:
    figures = figures_of(state("running"), state("running", 1))
    figures.close(False, killed=True)
    assert (figures.ending, [rank.words for rank in figures.ranks.values()]) == ("killed", ["killed", "killed"])
    failed = figures_of(Failed(rank=0, time=0, name="ValueError", text="", lines=()))
    failed.close(False, killed=True)
    assert failed.ending == "failed", "that it failed came first"


def test_where_a_metric_is_not_finite_for_the_first_time() -> None:
    figures = figures_of(logged(0, 7, loss=1.0), logged(1, 7, loss=2.0))
    assert figures.alerts == []
    figures.receive(logged(1, 8, loss=NAN))
    figures.receive(logged(0, 9, loss=NAN, accuracy=-math.inf))
    figures.receive(logged(1, 9, loss=1.0))
    assert figures.alerts == ["loss is NaN: first at step 8, rank 1", "accuracy is -inf: first at step 9, rank 0"]
    figures.receive(logged(0, 10, **{f"layer {layer}": NAN for layer in range(4)}))
    assert figures.alerts[2:] == ["layer 0 is NaN: first at step 10, rank 0", "3 more metrics are not finite"]
    assert figures_of(logged(0, 1200, loss=NAN)).alerts == ["loss is NaN: first at step 1,200"]


def test_a_metric_that_is_finite_again_was_not() -> None:
    one = figures_of(logged(0, 1200, loss=NAN), logged(0, 1201, loss=1.0))
    assert one.alerts == ["loss was NaN at step 1,200"]
    figures = figures_of(logged(0, 128, loss=NAN), logged(1, 128, loss=1.0))
    assert figures.alerts == ["loss is NaN: first at step 128, rank 0"]
    figures.receive(logged(0, 129, loss=1.0))
    assert figures.alerts == ["loss was NaN at step 128 (rank 0)"]
    all_of_them = figures_of(logged(0, 128, loss=NAN), logged(1, 128, loss=NAN))
    assert all_of_them.alerts == ["loss is NaN: first at step 128, on all ranks"]
    for rank in (0, 1):
        all_of_them.receive(logged(rank, 129, loss=1.0))
    assert all_of_them.alerts == ["loss was NaN at step 128 (on all ranks)"]


def test_without_a_loader_no_samples_are_counted() -> None:
    figures = figures_of(speed(0, 1, 10), speed(0, 2, 20))
    assert (figures.lead.samples_per_second, figures.samples_per_second) == (None, None)
    assert list(figures.lead.curves) == ["speed/steps"]


def test_the_last_printed_line() -> None:
    figures = RankFigures()
    for text, seen in (
        ("one\ntwo", "two"),
        (" and more\n\n", "two and more"),
        ("\r 10%\r 20%", "20%"),
        ("\r\x1b[31m 30%\x1b[0m", "30%"),
        ("\n \n", "30%"),
        ("x" * 10_000, "x" * LINE),
    ):
        figures.printed(text)
        assert figures.line == seen
    assert len(figures._text) <= 4 * LINE


# curves of a rank


def test_curves_of_a_rank() -> None:
    figures = figures_of(
        logged(0, 3, loss=0.5), speed(0, 0.5, 1, 8, operations=1e12), speed(0, 1.5, 3, 24, operations=3e12),
        Memory(rank=0, time=1001, process=9, reserved=8, allocated=7, retries=1), phases(1, 10, data=1.0, forward=2.0),
        phases(2, 20, data=1.5, forward=2.2, rest=0.1), phases(3, 20, data=2.5, forward=2.2, rest=0.1),
    )  # fmt: skip
    seen = {key: list(series.buckets())[-1][::2] for key, series in figures.series().items()}
    assert seen == {
        "metric/loss/0": (3, 0.5),
        "speed/samples/0": (1.5, 16),
        "speed/steps/0": (1.5, 2),
        "compute/tflops/0": (1.5, 2),
        "compute/share/0": (1.5, 0.5),
        "memory/used/0": (1, 8),
        "memory/allocated/0": (1, 7),
        "memory/reserved/0": (1, 8),
        "memory/retries/0": (1, 1),
        "phases/data/0": (2, 50),
        "phases/forward/0": (2, pytest.approx(20)),
        "phases/backward/0": (2, 0),
        "phases/communication/0": (2, 0),
        "phases/optimizer/0": (2, 0),
        "phases/rest/0": (2, pytest.approx(10)),
    }
    cpu = figures_of(Memory(rank=0, time=1001, process=9), speed(0, 1, 1), speed(0, 2, 2))
    assert set(cpu.series()) == {"memory/used/0", "speed/steps/0"}


def test_a_run_of_days_is_kept_in_bounded_memory() -> None:
    figures = figures_of()
    for tick in range(3 * BUCKETS):
        figures.receive(speed(0, tick / 2, tick))
        figures.receive(logged(0, tick, **{f"weight {tick}": 1.0}))
    assert len(figures.lead.metrics) == METRICS
    assert all(len(series) < BUCKETS for series in figures.lead.curves.values())


def test_time_left_is_that_of_all_epochs_also_across_short_ones() -> None:
    """An epoch of a second is over before its own pace is known."""
    figures = figures_of()
    for second in range(4):
        figures.receive(Progress(rank=0, time=second, done=3, total=10, epoch=second, epochs=6))
    assert figures.progress == {"epoch": 4, "done": 3, "total": 10, "left": 3.0, "epochs": 6}
    figures.receive(Progress(rank=0, time=5, done=1, total=4, epoch=3, epochs=6, stage="validation"))
    assert figures.progress["left"] == 1.0, "evaluations are a part of an epoch"


def test_the_share_of_all_epochs_never_falls_while_a_training_evaluates() -> None:
    figures = figures_of()
    shares, said = [], []
    for epoch in range(2):
        for stage, epochs, total in (("", 2, 32), ("validation", 2, 20)):
            for done in (1, total):
                event = Progress(rank=0, time=0, done=done, total=total, epoch=epoch, epochs=epochs, stage=stage)
                figures.receive(event)
                shares.append(figures.lead.training.share)
                said.append(place(figures.lead))
    assert shares == [1 / 64, 0.5, 0.5, 0.5, 33 / 64, 1.0, 1.0, 1.0]
    assert said[:3] == [
        "epoch 1 of 2 · 1/32 · 1 %",
        "epoch 1 of 2 · 32/32 · 50 %",
        "epoch 1 of 2 · validation 1/20 · 50 %",
    ]
    assert figures.progress == {
        "epoch": 2, "done": 20, "total": 20, "left": 0.0, "epochs": 2, "stage": "validation", "trained": 1,
    }  # fmt: skip
    # After all epochs a loop counts its own.
    figures.receive(Progress(rank=0, time=0, done=3, total=20, epoch=0, stage="validation"))
    assert place(figures.lead) == "epoch 2 of 2 · validation 3/20 · 100 %"


def test_a_run_begins_when_it_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = lambda: 1010.0  # noqa: E731
    monkeypatch.setattr("time.time", clock)
    figures = Figures(1004.0)
    assert [figures.tick(now) for now in (50.0, 51.5)] == [6.0, 7.5]
    assert [Figures().tick(50.0)] == [0.0]


# messages


RUN = {
    "id": "ab", "cell": 3, "summary": "", "strategy": "ddp", "devices": ["cpu", "cpu"], "began": 1000.0, "kernel": "",
    "background": False,
}  # fmt: skip


class Reader:
    """Somebody who watches: what it knows is what it was told."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.messages: list[dict[str, Any]] = []
        self.leave = feed.subscribe(self.hear)
        self.begin(feed.everything())

    def begin(self, everything: dict[str, Any]) -> None:
        self.seq = everything["seq"]
        self.rows = {row["rank"]: dict(row) for row in everything["ranks"]}
        self.progress = everything["progress"]
        self.alerts = everything["alerts"]
        self.ended = everything["ended"]
        self.last = {key: series["last"] for key, series in everything["series"].items()}
        self.counts = {key: series["count"] for key, series in everything["series"].items()}

    def hear(self, message: dict[str, Any]) -> None:
        json.dumps(message, allow_nan=False)
        self.messages.append(message)
        if message["kind"] == "all":
            self.begin(message)
            return
        if message["seq"] <= self.seq:  # it was in `everything`
            return
        assert message["seq"] == self.seq + 1
        self.seq = message["seq"]
        for row in message["ranks"]:
            self.rows.setdefault(row["rank"], {}).update(row)
        for key, (xs, ys) in message["points"].items():
            assert len(xs) == len(ys) <= 64
            self.last[key] = ys[-1]
            self.counts[key] = self.counts.get(key, 0) + len(ys)
        self.progress = message.get("progress", self.progress)
        self.alerts = message.get("alerts", self.alerts)
        self.ended = message.get("ended", self.ended)

    def agrees(self) -> bool:
        everything = self.feed.everything()
        return (
            self.rows == {row["rank"]: row for row in everything["ranks"]}
            and self.progress == everything["progress"]
            and self.alerts == everything["alerts"]
            and self.ended == everything["ended"]
            and self.last == {key: series["last"] for key, series in everything["series"].items()}
        )


@pytest.fixture
def feed() -> Feed:
    feed = Feed(RUN)
    feed.figures = Figures()  # its clock begins with the first tick
    return feed


def test_who_listens_knows_all_that_is_known(feed: Feed) -> None:
    feed.receive(state("running"))
    feed.receive(logged(0, 0, loss=2.0))
    reader = Reader(feed)
    assert (reader.rows[0]["state"], reader.last) == ("running", {"metric/loss/0": 2})
    for tick in range(1, 100):
        feed.receive(speed(0, tick / 20, tick, 8 * tick))
        feed.receive(logged(tick % 2, tick, loss=1 / tick, accuracy=NAN))
        feed.receive(Progress(rank=0, time=tick / 20, done=tick, total=200, epoch=0))
        feed.line(1, f"step {tick}\n")
        feed.tick(tick / 20)
        if tick == 50:
            late = Reader(feed)
    feed.receive(Finished(rank=0, time=5, steps=99))
    feed.closed(True, "3 names came home")
    for one in (reader, late):
        assert one.agrees()
        assert one.ended == {"how": "done", "text": "3 names came home"}
        assert one.counts["metric/loss/0"] == 50
        assert one.alerts == ["accuracy is NaN: first at step 1, rank 1"]
    assert sum("alerts" in message for message in reader.messages) == 2, "when it came, and in the end"
    assert reader.rows[1]["line"] == "step 99"
    assert [message["kind"] for message in late.messages[-2:]] == ["news", "end"]
    after = Reader(feed)
    assert (after.ended, after.rows) == (reader.ended, reader.rows)


def test_a_feed_knows_what_another_one_knew(feed: Feed) -> None:
    other = Feed({})
    figures, heard = other.figures, []
    other.subscribe(heard.append)
    feed.subscribe(lambda message: None)
    for step in range(10_000):
        feed.receive(logged(1, step, loss=step % 7))
    other.take(feed.snapshot())
    feed.closed(False, "boom")
    other.take(feed.snapshot())
    assert other.figures is figures  # views have it
    assert [message["kind"] for message in heard] == ["all", "all"]
    assert [message["ended"] for message in heard] == [None, feed.ended]
    for message in (*heard, other.everything()):
        assert message["series"] == feed.everything()["series"]
        assert message["run"] == RUN
    assert len(feed.snapshot()) < 100_000


def test_that_the_ranks_have_ended_is_told_at_once(feed: Feed) -> None:
    """Of a run in the background, whose work comes home later."""
    reader = Reader(feed)
    feed.receive(state("running"))
    feed.tick(0)
    feed.receive(Finished(rank=0, time=0, steps=9))
    feed.ranks_ended(0.01)
    assert reader.rows[0]["state"] == "done"
    assert reader.messages[-1]["homeward"]
    assert feed.everything()["homeward"]
    feed.closed(False, "no room", failed=True)
    assert reader.ended == {"how": "failed", "text": "no room"}


def test_news_come_ten_times_a_second_and_say_only_what_has_changed(feed: Feed) -> None:
    reader = Reader(feed)
    feed.receive(state("running"))
    feed.receive(state("running", 1))
    for tick in range(1, 101):
        feed.receive(logged(0, tick, loss=tick))
        feed.tick(tick / 100)
    assert 10 <= len(reader.messages) <= 11
    assert [row["rank"] for row in reader.messages[0]["ranks"]] == [0, 1]
    assert all(message["ranks"] == [] and "progress" not in message for message in reader.messages[1:])
    assert reader.messages[1]["points"] == {"metric/loss/0": [[*range(2, 12)]] * 2}
    feed.receive(Use(rank=1, time=0, processor=0.5))
    feed.tick(2)
    assert reader.messages[-1]["ranks"] == [{"rank": 1, "use": 0.5}]


def test_a_run_in_which_nothing_happens_still_tells_the_time(feed: Feed) -> None:
    reader = Reader(feed)
    for tick in range(51):
        feed.tick(tick / 10)
    assert [message["now"] for message in reader.messages] == [0, 1, 2, 3, 4, 5]


def test_many_points_make_a_small_message_that_keeps_the_extremes(feed: Feed) -> None:
    reader = Reader(feed)
    for step in range(50_000):
        feed.receive(logged(0, step, loss=-7 if step == 33_333 else step % 10))
    for step in range(100):
        feed.receive(logged(1, 0, **{f"weight {name}": float(step) for name in range(METRICS)}))
    feed.tick(0)
    (message,) = reader.messages
    assert min(message["points"]["metric/loss/0"][1]) == -7
    assert len(json.dumps(message)) < 100_000
    assert reader.agrees()
    assert len(json.dumps(feed.everything())) < 1_500_000


def test_a_first_line_that_comes_late_is_told(feed: Feed) -> None:
    feed.opened("ddp")
    reader = Reader(feed)
    feed.receive(state("running"))
    feed.opened("ddp · 2 ranks")
    feed.tick(0)
    feed.receive(state("dead"))
    feed.tick(1)
    assert [message["kind"] for message in reader.messages] == ["all", "news"]
    assert reader.messages[0]["run"]["summary"] == "ddp · 2 ranks"
    assert reader.agrees()


def test_nothing_is_kept_for_nobody(feed: Feed) -> None:
    reader = Reader(feed)
    reader.leave()
    for step in range(1000):
        feed.receive(logged(0, step, loss=1.0))
        feed.tick(step)
    assert not reader.messages
    assert not feed._points
    assert not feed._outbox


def test_who_cannot_listen_is_left_and_the_run_goes_on(feed: Feed) -> None:
    def fails(message: dict[str, Any]) -> None:
        raise OSError("the page is gone")

    feed.subscribe(fails)
    reader = Reader(feed)
    feed.receive(state("running"))
    with pytest.warns(RuntimeWarning, match=r"gets no more updates: OSError\('the page is gone'\)"):
        feed.tick(0)
    feed.receive(state("dead"))
    feed.tick(1)
    assert reader.agrees()


def test_everything_may_be_asked_for_from_other_threads(feed: Feed) -> None:
    """Each answer fits the messages before and after it."""
    reader = Reader(feed)
    found: list[dict[str, Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.001):  # without a pause it would keep the lock for itself
            found.append(feed.everything())

    asking = threading.Thread(target=ask)
    asking.start()
    for step in range(3000):
        feed.receive(logged(0, step, loss=step))
        feed.tick(step / 10)
    over.set()
    asking.join()
    feed.closed(True)
    assert reader.counts["metric/loss/0"] == 3000
    told = {one["seq"]: one["points"]["metric/loss/0"][1][-1] for one in reader.messages if one.get("points")}
    assert len(found) > 1
    for everything in found:
        if everything["series"] and everything["seq"]:
            assert everything["series"]["metric/loss/0"]["last"] == told[everything["seq"]]
