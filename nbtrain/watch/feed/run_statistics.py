"""Computes the figures of a run from its events: rates, time left, what each rank is doing, curves."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.events import (  # fmt: skip
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
from nbtrain.watch.feed.series import LIMIT, Series, number
from nbtrain.watch.feed.training_progress import Rate, TrainingProgress

METRICS = 64
"""metrics that are kept of one rank, at most"""
NAMES = 2048
"""names of others that are counted, at most"""
BUCKETS = LIMIT // 4
"""buckets of a curve over time, enough for half an hour at two points a second"""
LASTS = 0.9
"""seconds after which a rank that waits is said to wait"""
ALERTS = 3
"""metrics that are named when they are not finite, at most"""
LINE = 240
"""characters of a printed line"""
OF_A_GROUP = "DistBackendError", "DistNetworkError", "DistStoreError", "HorovodInternalError"
"""what a collective raises when a rank is gone; gloo's is a RuntimeError, and so is many a mistake of the cell's"""

_PEER_IS_GONE = re.compile(r"(closed|reset) by peer|broken pipe|socket closed", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TONES = {
    "running": "busy", "waiting for data": "wait", "done": "good", "failed": "bad", "dead": "bad",
}  # fmt: skip

Point = Callable[[str, Sequence[tuple[float, float]]], None]
"""takes the name of a curve (`memory/used`) and points (x, y) that are added to it"""


def unheard(curve: str, points: Sequence[tuple[float, float]]) -> None:
    """Where nobody asks for points as they come."""


@dataclass(kw_only=True, slots=True)
class RankFigures:
    """What is known of one rank."""

    rank: int = 0
    device: str = ""
    state: str = ""
    """its last RankState; `words` is what users read"""
    note: str = ""
    """the exception that ended it"""
    lost_a_peer: bool = False
    """that came out of a collective for want of another rank"""
    ended: bool = False
    steps: int = 0
    samples: float = 0
    seconds: float = 0.0
    step_rate: Rate = field(default_factory=Rate)
    sample_rate: Rate = field(default_factory=Rate)
    operation_rate: Rate = field(default_factory=Rate)
    fastest: float = 0.0
    memory: int | None = None
    peak: int = 0
    measured: Memory | None = None
    use: Use | None = None
    phases: Phases | None = None
    lasting: bool = False
    """it has been in the same phase of the same step for a while"""
    line: str = ""
    """what it printed last"""
    training: TrainingProgress = field(default_factory=TrainingProgress)
    metrics: dict[str, Series] = field(default_factory=dict)
    """what the user's own `log` said, by name"""
    left_out: set[str] = field(default_factory=set)
    """names of metrics that are not kept, because there are so many"""
    not_finite: dict[str, tuple[float, float]] = field(default_factory=dict)
    """metric → (step, value) where it was NaN or infinite for the first time"""
    curves: dict[str, Series] = field(default_factory=dict)
    """other values over time, by chart and name"""
    _since: Phases | None = None
    _counted: Phases | None = None
    _text: str = ""

    def receive(self, event: Event, seconds: float, point: Point) -> None:
        """`seconds`: since the run began. `point` is called with what is added to a curve."""
        if isinstance(event, Throughput):
            self._speed(event, seconds, point)
        elif isinstance(event, Memory):
            self._memory(event, seconds, point)
        elif isinstance(event, Phases):
            self._phases(event, seconds, point)
        elif isinstance(event, Use):
            self.use = event
        elif isinstance(event, Progress):
            self.training.receive(event)
        elif isinstance(event, Metrics):
            for name, points in event.points.items():
                if name not in self.metrics and len(self.metrics) < METRICS:
                    self.metrics[name] = Series()
                if name in self.metrics:
                    self.metrics[name].extend(points)
                    self._check(name, points)
                    point(f"metric/{name}", points)
                elif len(self.left_out) < NAMES:
                    self.left_out.add(name)
        else:
            self._state(event)

    def _check(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        if name not in self.not_finite and (odd := [point for point in points if not math.isfinite(point[1])]):
            self.not_finite[name] = odd[0]

    def printed(self, text: str) -> None:
        """Keep the last line of what it prints; a progress bar writes one line again and again."""
        *lines, self._text = re.split(r"[\r\n]+", (self._text + text)[-4 * LINE :])
        said = [line for line in (*lines, self._text) if (_COLOURS.sub("", line)).strip()]
        if said:
            self.line = _COLOURS.sub("", said[-1]).strip()[:LINE]

    def _speed(self, event: Throughput, seconds: float, point: Point) -> None:
        self.steps, self.samples, self.seconds = event.steps, event.samples, event.seconds
        self.step_rate.add(event.seconds, event.steps)
        self.sample_rate.add(event.seconds, event.samples)
        self._add("speed/samples", seconds, self.sample_rate.value if event.samples else None, point)
        self._add("speed/steps", seconds, self.step_rate.value, point)
        if event.operations:
            self.fastest = event.fastest
            self.operation_rate.add(event.seconds, event.operations)
            rate = self.operation_rate.value
            self._add("compute/tflops", seconds, None if rate is None else rate / 1e12, point)
            self._add("compute/share", seconds, self.share, point)

    def _memory(self, event: Memory, seconds: float, point: Point) -> None:
        self.measured = event
        # where torch holds nothing on a device, the process is what counts
        self.memory = event.reserved or event.process
        self.peak = max(self.peak, event.peak, self.memory)
        self._add("memory/used", seconds, self.memory, point)
        if event.reserved:
            for name in ("allocated", "reserved", "retries"):
                self._add(f"memory/{name}", seconds, getattr(event, name), point)

    def _phases(self, event: Phases, seconds: float, point: Point) -> None:
        self.phases = event
        since = self._since
        if since is None or (since.now, since.within, since.steps) != (event.now, event.within, event.steps):
            since = self._since = event
        self.lasting = event.time - since.time >= LASTS
        if self._counted is None or event.steps < self._counted.steps:
            self._counted = event
        elif steps := event.steps - self._counted.steps:
            spent = [now - then for now, then in zip(event.seconds, self._counted.seconds, strict=True)]
            for phase, took in zip(PHASES, spent, strict=True):
                self._add(f"phases/{phase}", seconds, 1000 * max(0.0, took) / steps, point)
            self._counted = event

    def _state(self, event: Event) -> None:
        if isinstance(event, RankState):
            if event.state == "dead":
                self.state, self.note, self.ended = "dead", "; ".join(event.notes), True
            elif not self.ended:  # `idle` follows `done`
                self.state = event.state
        elif isinstance(event, Failed):
            self.state, self.note = ("stopped", "") if event.interrupted else ("failed", event.name)
            self.lost_a_peer = event.name in OF_A_GROUP or _PEER_IS_GONE.search(event.text) is not None
            self.ended = True
        elif isinstance(event, Finished):
            if not self.ended:  # what was stopped, or has failed, may still bring home what it did
                self.state, self.ended = "done", True
            self.steps = max(self.steps, event.steps)

    def _add(self, curve: str, seconds: float, value: float | None, point: Point) -> None:
        if value is None:
            return
        if curve not in self.curves:
            self.curves[curve] = Series(BUCKETS)
        self.curves[curve].add(seconds, value)
        point(curve, ((seconds, value),))

    @property
    def words(self) -> str:
        """What the rank is doing."""
        if self.state == "running" and self.lasting and self.phases is not None:
            if self.phases.within:
                return self.phases.within
            if self.phases.now == "data":
                return "waiting for data"
        return self.state

    @property
    def tone(self) -> str:
        """quiet, busy, wait, good or bad."""
        words = self.words
        return "wait" if words != self.state else _TONES.get(words, "quiet")

    @property
    def steps_per_second(self) -> float | None:
        return self._rate(self.step_rate, self.steps)

    @property
    def samples_per_second(self) -> float | None:
        """None without a DataLoader, whose samples are counted."""
        return self._rate(self.sample_rate, self.samples) if self.samples else None

    def _rate(self, lately: Rate, total: float) -> float | None:
        """The rate of the last seconds while it runs, of the whole run when it is over."""
        if self.ended and self.seconds:
            return total / self.seconds
        return lately.value

    @property
    def share(self) -> float | None:
        """The share of its device's peak that it computes, lately."""
        rate = self.operation_rate.value
        return None if rate is None or not self.fastest else rate / self.fastest

    @property
    def progress(self) -> Progress | None:
        return self.training.last

    @property
    def left(self) -> float | None:
        return None if self.ended else self.training.left

    def row(self) -> dict[str, Any]:
        """The rank's row in a table."""
        of_memory = ("limit", "process", "allocated", "reserved", "retries")
        return {
            "rank": self.rank,
            "device": self.device,
            "state": self.words,
            "detail": self.note,
            "tone": self.tone,
            "ended": self.ended,
            "step": self.steps,
            "rate": number(self.samples_per_second),
            "memory": self.memory,
            "peak": self.peak,
            **{name: getattr(self.measured, name, 0) for name in of_memory},
            "use": number(self.use.processor) if self.use else None,
            "card": number(self.use.card) if self.use else None,
            "line": self.line,
        }


class Figures:
    """The figures of one run."""

    def __init__(self, began: float | None = None, devices: tuple[str, ...] = ()) -> None:
        """`began`: seconds since the epoch; without it the run begins with the first event."""
        self.ranks: dict[int, RankFigures] = {}
        self.point: Point = unheard
        """called with what is added to a curve, which it gets by its key (`memory/used/0`)"""
        self.ending = ""
        """how the run ended"""
        self._devices = devices
        self.begin(began)

    def begin(self, began: float | None) -> None:
        """Let the run's time start there."""
        self._began = began
        self._dated = began is not None
        self._first: float | None = None
        self._now = 0.0

    def of(self, rank: int) -> RankFigures:
        if rank not in self.ranks:
            device = self._devices[rank] if rank < len(self._devices) else ""
            self.ranks[rank] = RankFigures(rank=rank, device=device)
            self.ranks = dict(sorted(self.ranks.items()))
        return self.ranks[rank]

    def receive(self, event: Event) -> None:
        if self._began is None:
            self._began = event.time
        self.of(event.rank).receive(event, max(0.0, event.time - self._began), self._pointer(event.rank))
        if isinstance(event, Failed | RankState):
            self._blame_the_dead()

    def _blame_the_dead(self) -> None:
        """Where a rank has died, the collectives of the others fail: no error of theirs."""
        died = next((rank for rank, figures in self.ranks.items() if figures.state == "dead"), None)
        for figures in self.ranks.values() if died is not None else ():
            if figures.state == "failed" and figures.lost_a_peer:
                figures.state, figures.note = "stopped", f"rank {died} died"

    def _pointer(self, rank: int) -> Point:
        told = self.point
        return lambda curve, points: told(f"{curve}/{rank}", points)

    def tick(self, now: float) -> float:
        """Seconds since the run began, or since the first tick, by the session's clock."""
        if self._first is None:
            before = time.time() - self._began if self._dated and self._began is not None else 0.0
            self._first = now - max(0.0, before)
        self._now = now
        return self.elapsed

    def close(self, ok: bool, killed: bool = False, failed: bool = False) -> None:
        """The run ended; ranks that did not report how are shown as ended. `failed`: though no rank did."""
        for figures in self.ranks.values():
            if not figures.ended:
                figures.state, figures.ended = "killed" if killed else "ended", True
        bad = failed or any(figures.tone == "bad" for figures in self.ranks.values())
        self.ending = "done" if ok else "failed" if bad else "killed" if killed else "stopped"

    @property
    def alerts(self) -> list[str]:
        """A sentence about each metric that is not finite: `loss is NaN: first at step 120, rank 3`; where it is finite
        again: `loss was NaN at step 120 (rank 3)`."""
        odd = [(at[0], rank, name) for rank, figures in self.ranks.items() for name, at in figures.not_finite.items()]
        first: dict[str, int] = {}
        for _, rank, name in sorted(odd):
            first.setdefault(name, rank)
        more = len(first) - ALERTS
        rest = [f"{more} more metric{'s are' if more > 1 else ' is'} not finite"] if more > 0 else []
        return [*(self._alert(name, rank) for name, rank in list(first.items())[:ALERTS]), *rest]

    def _alert(self, name: str, rank: int) -> str:
        """`rank`: the one that was first."""
        step, value = self.ranks[rank].not_finite[name]
        what = "NaN" if math.isnan(value) else f"{value:g}"
        logging = [figures for figures in self.ranks.values() if name in figures.metrics]
        alike = [figures for figures in logging if name in figures.not_finite and figures.not_finite[name][0] == step]
        where = "on all ranks" if len(alike) == len(logging) > 1 else f"rank {rank}" if len(self.ranks) > 1 else ""
        if any(not math.isfinite(figures.metrics[name].last) for figures in logging):
            return f"{name} is {what}: first at step {step:,.0f}{where and f', {where}'}"
        return f"{name} was {what} at step {step:,.0f}" + (f" ({where})" if where else "")

    @property
    def elapsed(self) -> float:
        return 0.0 if self._first is None else self._now - self._first

    @property
    def lead(self) -> RankFigures:
        """The lowest rank, which stands for all in what is equal on all: steps, progress, metrics."""
        return next(iter(self.ranks.values()), RankFigures())

    @property
    def metrics(self) -> dict[str, dict[int, Series]]:
        """Metric → rank → its curve."""
        by_name: dict[str, dict[int, Series]] = {}
        for rank, figures in self.ranks.items():
            for name, series in figures.metrics.items():
                by_name.setdefault(name, {})[rank] = series
        return by_name

    @property
    def over(self) -> str:
        """What rates are of: while it runs of the last seconds, as curves are; when it is over of all of it."""
        return " on average" if self.ending else ""

    @property
    def samples_per_second(self) -> float | None:
        rates = [rate for figures in self.ranks.values() if (rate := figures.samples_per_second) is not None]
        return sum(rates) if rates else None

    @property
    def progress(self) -> dict[str, Any] | None:
        progress = self.lead.progress
        if progress is None:
            return None
        left = self.lead.left
        words: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "done": progress.done,
            "total": progress.total,
            "left": None if left is None or not math.isfinite(left) else round(left, 1),
        }
        if progress.epochs is not None:
            words["epochs"] = progress.epochs
        if progress.stage:
            words["stage"] = progress.stage
        if (trained := self.lead.training.trained) is not None:
            words["trained"] = number(trained)
        return words

    def series(self) -> dict[str, Series]:
        """All curves by their keys: `metric/loss/0`, `memory/used/0`."""
        by_key: dict[str, Series] = {}
        for rank, figures in self.ranks.items():
            by_key |= {f"metric/{name}/{rank}": series for name, series in figures.metrics.items()}
            by_key |= {f"{curve}/{rank}": series for curve, series in figures.curves.items()}
        return by_key
