"""In which order ways are tried, and what becomes of trials that fail or are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.trials import compare_trials
from nbtrain.annexes.planning.trials.attempt import Attempt, NothingToMeasure, RunWay
from nbtrain.annexes.planning.trials.compare_trials import Comparing, Question
from nbtrain.base.specs import RunSpec, Trial


class Clock:
    """Goes on by some seconds with each trial."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Tries(Attempt):
    """Ways that are as fast as a script says."""

    def __init__(self, clock: Clock, seconds: float, **paces: Iterator[Any]) -> None:
        self.clock, self.seconds, self.paces = clock, seconds, paces
        self.order: list[str] = []

    def check(self, name: str) -> None:
        pass

    def try_out(self, way: RunWay, trial: Trial) -> dict[str, Any]:
        self.order.append(way.name)
        self.clock.now += self.seconds
        found = next(self.paces[way.name])
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, str):
            return {"state": "failed", "why": found}
        pace, memory = found
        return {
            "state": "done", "why": "", "ranks": 2, "memory": memory, "steps": trial.steps, "step": 1 / pace,
            "steps_per_second": pace, "samples_per_second": 8 * pace, "batch": 4, "grown": True,
        }  # fmt: skip


def steady(pace: float) -> Iterator[Any]:
    """A machine that is now and then slower by a percent."""
    while True:
        yield pace, (7, 5)
        yield pace * 0.99, (6, 9)


def compared(
    monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1, goal: str = "speed", **paces: Iterator[Any]
) -> tuple[Comparison, list[str]]:
    clock = Clock()
    monkeypatch.setattr(compare_trials, "time", clock)
    attempt = Tries(clock, seconds, **paces)
    ways = [RunWay(name=name, line=f"--strategy {name}", spec=RunSpec) for name in paces]  # type: ignore[arg-type]
    return Comparing(attempt, Question(goal=goal), ways, lambda found: None).run(), attempt.order


def test_ways_take_turns_and_the_row_is_of_all_their_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = compared(monkeypatch, ddp=steady(100), zero1=steady(80))
    assert order == ["ddp", "zero1", "zero1", "ddp"] * (compare_trials.MOST_ROUNDS // 2)
    row = found.rows[0]
    assert (row.samples_per_second, row.steps_per_second) == pytest.approx((796, 99.5))
    assert row.memory == (7, 9)
    assert len(row.paces) == compare_trials.MOST_ROUNDS
    assert row.spread == pytest.approx(2.365 * 8 * 0.5345 / 8**0.5, rel=1e-3)
    assert found.best is row


def test_long_trials_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, order = compared(monkeypatch, seconds=60.0, ddp=steady(100), zero1=steady(80))
    assert order == ["ddp", "zero1", "zero1", "ddp", "ddp", "zero1"]
    found, order = compared(monkeypatch, seconds=200.0, ddp=steady(100), zero1=steady(95), fsdp=steady(40))
    assert order == ["ddp", "zero1", "fsdp"]
    assert found.best is None, "one trial says little"
    assert [row.name for row in found.contenders] == ["ddp", "zero1"]


def test_what_fails_is_not_tried_again_and_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([(90.0, (1, 1)), "out of memory"])
    found, order = compared(monkeypatch, ddp=steady(100), zero1=fails, none=iter(["not here"]))
    assert order[:6] == ["ddp", "zero1", "none", "zero1", "ddp", "ddp"]
    assert [row.state for row in found.rows] == ["done", "failed", "failed"]
    assert found.rows[1].paces == ()
    assert found.best is found.rows[0]


def test_stop_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = iter([(90.0, (1, 1)), (91.0, (1, 1)), KeyboardInterrupt()])
    found, _ = compared(monkeypatch, ddp=steady(100), zero1=stops)
    assert [(row.state, len(row.paces)) for row in found.rows] == [("done", 3), ("done", 2)]
    found, _ = compared(monkeypatch, ddp=steady(100), zero1=iter([KeyboardInterrupt()]))
    assert [(row.state, row.why) for row in found.rows] == [("done", ""), ("failed", "stopped")]


@pytest.mark.parametrize("goal", ["speed", "batch"])
def test_a_cell_without_a_step_is_not_tried_in_every_way(monkeypatch: pytest.MonkeyPatch, goal: str) -> None:
    never = iter([NothingToMeasure("nothing to measure")])
    with pytest.raises(NothingToMeasure):
        compared(monkeypatch, goal=goal, ddp=never, zero1=iter([]))
