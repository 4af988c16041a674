"""The figures every view shows: events in; rates, time left, latest metrics and words for them out."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from nbtrain.events import Event, Failed, Finished, Memory, Metric, Progress, RankState, Throughput
from nbtrain.words import size

QUIET = 2.0
"""a cell shorter than this (seconds) shows nothing"""
WINDOW = 5.0
"""rates are those of the last so many seconds"""
CURVES = 12
"""so many metrics are shown"""
POINTS = 240
"""a curve keeps at most so many points, spread over the whole run"""


class Rate:
    """How fast a total grows, judged by the last few seconds; None while that cannot be said."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, float]] = deque()

    def add(self, seconds: float, total: float) -> None:
        totals = self._totals
        if totals and (seconds < totals[-1][0] or total < totals[-1][1]):
            totals.clear()  # a new epoch, a new count
        totals.append((seconds, total))
        while len(totals) > 2 and totals[1][0] <= seconds - WINDOW:
            totals.popleft()

    @property
    def value(self) -> float | None:
        if len(self._totals) < 2:
            return None
        (began, before), (now, total) = self._totals[0], self._totals[-1]
        return (total - before) / (now - began) if now > began else None


class Curve:
    """A metric over the whole run in few points: when there are too many, every other one goes."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.last = math.nan
        self._every = 1
        self._count = 0

    def add(self, step: int, value: float) -> None:
        self.last = value
        if self._count % self._every == 0 and math.isfinite(value):
            self.points.append((step, value))
            if len(self.points) > POINTS:
                del self.points[1::2]
                self._every *= 2
        self._count += 1


@dataclass(kw_only=True, slots=True)
class RankFigures:
    """What is known of one rank."""

    state: str = ""
    note: str = ""
    """beside the state: the exception that ended it"""
    ended: bool = False
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    step_rate: Rate = field(default_factory=Rate)
    sample_rate: Rate = field(default_factory=Rate)
    memory: int | None = None
    peak: int = 0
    progress: Progress | None = None
    progress_rate: Rate = field(default_factory=Rate)
    curves: dict[str, Curve] = field(default_factory=dict)

    def receive(self, event: Event) -> None:
        if isinstance(event, Throughput):
            self.steps, self.samples, self.seconds = event.steps, event.samples, event.seconds
            self.step_rate.add(event.seconds, event.steps)
            self.sample_rate.add(event.seconds, event.samples)
        elif isinstance(event, Memory):
            # where torch holds nothing on a device, the process is what counts
            self.memory = event.reserved or event.process
            self.peak = max(self.peak, event.peak, self.memory)
        elif isinstance(event, Progress):
            if self.progress is not None and event.epoch != self.progress.epoch:
                self.progress_rate = Rate()
            self.progress = event
            self.progress_rate.add(event.time, event.done)
        elif isinstance(event, Metric):
            for name, value in event.values.items():
                self.curves.setdefault(name, Curve()).add(event.step, float(value))
        elif isinstance(event, RankState):
            self.state = self.state if self.ended else event.state  # `idle` follows `done`
        elif isinstance(event, Failed):
            self.state, self.note = ("stopped", "") if event.interrupted else ("failed", event.name)
            self.ended = True
        elif isinstance(event, Finished):
            self.state, self.ended = "done", True
            self.steps = max(self.steps, event.steps)

    @property
    def steps_per_second(self) -> float | None:
        return self._rate(self.step_rate, self.steps)

    @property
    def samples_per_second(self) -> float | None:
        return self._rate(self.sample_rate, self.samples)

    def _rate(self, lately: Rate, total: int) -> float | None:
        """Of the last seconds while it runs, of the whole run when it is over."""
        if self.ended and self.seconds:
            return total / self.seconds
        return lately.value

    @property
    def left(self) -> float | None:
        """Seconds to the end of the loader, when its length is known."""
        rate = self.progress_rate.value
        if self.ended or self.progress is None or self.progress.total is None or not rate:
            return None
        return max(0.0, self.progress.total - self.progress.done) / rate


class Figures:
    """One run, as far as its events tell."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankFigures] = {}
        self._began: float | None = None
        self._now = 0.0

    def receive(self, event: Event) -> None:
        if event.rank not in self.ranks:
            self.ranks[event.rank] = RankFigures()
            self.ranks = dict(sorted(self.ranks.items()))
        self.ranks[event.rank].receive(event)

    def tick(self, now: float) -> float:
        """Seconds since the first tick: a view lives by the session's clock and has none of its own."""
        if self._began is None:
            self._began = now
        self._now = now
        return self.elapsed

    def close(self) -> None:
        """The run ended; ranks that did not say how were let go."""
        for figures in self.ranks.values():
            if not figures.ended:
                figures.state, figures.ended = "ended", True

    @property
    def elapsed(self) -> float:
        return 0.0 if self._began is None else self._now - self._began

    @property
    def lead(self) -> RankFigures:
        """The lowest rank speaks for all in what is equal on all: steps, progress, what was logged."""
        return next(iter(self.ranks.values()), RankFigures())

    @property
    def curves(self) -> dict[str, Curve]:
        """Those of the lowest rank that logged anything: `if rank == 1: log(...)` is seen too."""
        return next((figures.curves for figures in self.ranks.values() if figures.curves), {})

    @property
    def samples_per_second(self) -> float | None:
        rates = [rate for figures in self.ranks.values() if (rate := figures.samples_per_second) is not None]
        return sum(rates) if rates else None

    def words(self) -> list[str]:
        """The run in a few words each, what is not known left out."""
        lead = self.lead
        found = [duration(self.elapsed)]
        if lead.steps:
            found.append(f"step {lead.steps:,}")
        if rate := lead.steps_per_second:
            found.append(f"{quantity(rate)} steps/s")
        if rate := self.samples_per_second:
            found.append(f"{quantity(rate)} samples/s")
        if memory := _memories([figures.memory for figures in self.ranks.values() if figures.memory is not None]):
            found.append(f"memory {memory}")
        found += [f"{name} {metric(curve.last)}" for name, curve in list(self.curves.items())[:CURVES]]
        if lead.progress is not None:
            found.append(place(lead))
        found += [f"rank {rank}: {f.state} {f.note}".rstrip() for rank, f in self.ranks.items() if f.state == "failed"]
        return found


def place(figures: RankFigures) -> str:
    """`epoch 2 · 340/1200 · 28 % · 0:42 left`"""
    progress = figures.progress
    if progress is None:
        return ""
    words = [f"epoch {progress.epoch + 1}"]  # people count from one
    if progress.total:
        words += [f"{progress.done}/{progress.total}", f"{100 * progress.done // progress.total} %"]
        if progress.done < progress.total and figures.left is not None:
            words.append(f"{duration(figures.left)} left")
    else:
        words.append(f"batch {progress.done}")
    return " · ".join(words)


def _memories(sizes: list[int]) -> str:
    if not sizes:
        return ""
    low, high = size(min(sizes)), size(max(sizes))
    if low == high:
        return f"{low} per rank" if len(sizes) > 1 else low
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{low}–{high} per rank"


def duration(seconds: float) -> str:
    """0:42, 12:03, 1:02:03"""
    minutes, rest = divmod(math.ceil(seconds - 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def quantity(value: float) -> str:
    """3,600 · 28.1 · 0.52"""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def metric(value: float) -> str:
    return f"{value:.4g}"
