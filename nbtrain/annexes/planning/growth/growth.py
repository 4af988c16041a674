"""Predicts how long a step takes on many ranks, from what it took on a few here.

A step is computing, bytes at a bandwidth, and rounds of a latency:

    seconds(n) = compute · slow(n) + (volume(n) / bandwidth + latency · log2(n)) · crowd(n)

`slow` and `crowd` count for ranks that share too few cores, as on one machine without GPUs: computing gets slower, and
the same cores also copy what is sent. Where every rank has cores or a device of its own, both are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import fmean
from typing import Any

import torch

from nbtrain.annexes.planning.growth import growth_table
from nbtrain.base.errors import UsageError

COUNTS = (8, 64, 512)
PER_NODE = 8
ALIKE = 1e-6
"""a term that improves the fit by less than this share of a step is left out"""

SINGULAR = 1e-5
"""relative tolerance below which a column depends on the others"""

Row = tuple[float, float, float]
Volume = Callable[[int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """How long a step was measured to take on `ranks` ranks."""

    ranks: int
    seconds: float
    """per step"""
    samples: float = 0
    """samples per step of all ranks together; 0: not known"""
    volume: float = 0
    """bytes that one rank sends per step"""
    cores: float = 0
    """cores that all ranks share; 0: each rank has a device of its own"""
    threads: int = 1
    """threads of one rank"""

    @property
    def share(self) -> float:
        """Cores per rank."""
        return min(self.threads, self.cores / self.ranks) if self.cores else float(self.threads)

    @property
    def crowd(self) -> float:
        """Ranks per core, at least 1."""
        return max(1.0, self.ranks / self.cores) if self.cores else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A measurement, and what the fit expects for it."""

    point: MeasuredStep
    expected: float
    fitted: bool
    """the fit has used this measurement, so agreement proves less"""

    @property
    def error(self) -> float:
        """Relative error; above 0: the step was faster than expected."""
        return self.expected / self.point.seconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step on `ranks` ranks is expected to take."""

    ranks: int
    nodes: int
    compute: float
    """seconds"""
    communication: float
    """seconds, without overlap"""
    seconds: float
    """seconds of a step"""
    at_best: float
    """seconds of a step if bytes move at the stated bandwidth and overlap with computing"""
    samples: float
    """samples per second of all ranks; 0: not known"""

    @property
    def efficiency(self) -> float:
        """Share of a step that is computing: 1 for a single rank."""
        return self.compute / self.seconds

    @property
    def waiting(self) -> float:
        """Share of a step that is communication."""
        return 1 - self.efficiency


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The fitted model of a step, with its measurements."""

    points: tuple[MeasuredStep, ...]
    """sorted by ranks"""
    compute: float
    """seconds of computing per step, on a rank with cores of its own"""
    bandwidth: float
    """bytes per second of one rank here; infinite: no time was found that depends on bytes"""
    latency: float
    """seconds per round"""
    fitted: tuple[int, ...]
    """counts of ranks that were fitted; other measurements are only checked"""
    volume: Volume = field(repr=False, compare=False)

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(
            Check(point=point, expected=self.expected(point), fitted=point.ranks in self.fitted)
            for point in self.points
        )

    @property
    def held_back(self) -> tuple[Check, ...]:
        """Checks of measurements that the fit did not use."""
        return tuple(check for check in self.checks if not check.fitted)

    def expected(self, point: MeasuredStep) -> float:
        """Seconds of a step under the conditions of a measurement."""
        factors = (self.compute, 1 / self.bandwidth, self.latency)
        return float(sum(map(mul, factors, _columns(point, self.points[0]))))

    def predict(self, ranks: int, nodes: int = 1, bandwidth: float = math.inf, overlap: float = 0.0) -> Prediction:
        """Predict a step on `ranks` ranks. `bandwidth`: bytes per second between nodes, each way; infinite: not stated.
        `overlap`: the share of communication that is hidden behind computing."""
        if ranks < 1 or not 1 <= nodes <= ranks:
            raise UsageError(f"{ranks} ranks on {nodes} nodes: every node needs a rank")
        if not bandwidth > 0 or not 0 <= overlap <= 1:
            raise UsageError("a bandwidth is more than 0 bytes/s, and an overlap is a share from 0 to 1")
        stated = self.bandwidth if bandwidth == math.inf else bandwidth
        communication = self._communication(ranks, min(self.bandwidth, stated) if nodes > 1 else self.bandwidth)
        best = stated if nodes > 1 else max(self.bandwidth, stated)
        seconds = self.compute + communication - min(overlap * communication, self.compute)
        first = self.points[0]
        return Prediction(
            ranks=ranks,
            nodes=nodes,
            compute=self.compute,
            communication=communication,
            seconds=seconds,
            at_best=min(seconds, max(self.compute, self._communication(ranks, best))),
            samples=first.samples / first.ranks * ranks / seconds,
        )

    def _communication(self, ranks: int, rate: float) -> float:
        return self.volume(ranks) / rate + self.latency * math.log2(ranks) if ranks > 1 else 0.0

    def at(
        self, bandwidth: float, counts: Sequence[int] = COUNTS, per_node: int = PER_NODE, overlap: float = 0.0
    ) -> GrowthForecast:
        """Predictions for several counts of ranks, with `per_node` ranks on each node."""
        rows = [self.predict(count, -(-count // per_node), bandwidth, overlap) for count in counts]
        return GrowthForecast(growth=self, rows=tuple(rows), bandwidth=bandwidth, per_node=per_node, overlap=overlap)


@dataclass(frozen=True, kw_only=True)
class GrowthForecast:
    """Predictions for more ranks than there are here."""

    growth: Growth
    rows: tuple[Prediction, ...]
    bandwidth: float
    """bytes per second between nodes, as stated"""
    per_node: int
    overlap: float

    def data(self) -> dict[str, Any]:
        """Everything as plain data: predictions, checks and assumptions."""
        growth, first = self.growth, self.growth.points[0]
        found: dict[str, Any] = {
            "bandwidth": self.bandwidth,
            "per_node": self.per_node,
            "overlap": self.overlap,
            "compute": growth.compute,
            "local_bandwidth": growth.bandwidth if growth.bandwidth < math.inf else None,
            "latency": growth.latency,
            "fitted": list(growth.fitted),
            "samples_per_rank": first.samples / first.ranks,
            "cores": first.cores,
            "cores_per_rank": first.share,
            "rows": [
                {
                    "ranks": row.ranks,
                    "nodes": row.nodes,
                    "seconds": row.seconds,
                    "at_best": row.at_best,
                    "samples_per_second": row.samples,
                    "efficiency": row.efficiency,
                    "communication": row.waiting,
                    "sent": growth.volume(row.ranks) if row.ranks > 1 else 0,
                }
                for row in self.rows
            ],
            "checks": [
                {
                    "ranks": check.point.ranks,
                    "measured": check.point.seconds,
                    "expected": check.expected,
                    "error": check.error,
                    "fitted": check.fitted,
                    "crowded": check.point.crowd > 1,
                }
                for check in growth.checks
            ],
        }
        return found | {"assumes": list(growth_table.assumptions(found))}

    def __repr__(self) -> str:
        return growth_table.text(self.data())

    def _repr_html_(self) -> str:
        return growth_table.html(self.data())


def ring(size: float) -> Volume:
    """Bytes that each rank sends when gradients of `size` bytes are averaged in a ring."""
    return lambda ranks: 2 * (ranks - 1) / ranks * size


def fit(points: Sequence[MeasuredStep], volume: Volume | None = None) -> Growth:
    """Fit the model to measurements. With four or more counts of ranks, the largest is held back and only checked.
    `volume`: bytes that each of so many ranks sends per step; without it, a ring fitted to what was sent here."""
    ordered = tuple(sorted(points, key=lambda point: point.ranks))
    _refuse_invalid(ordered)
    counts = sorted({point.ranks for point in ordered})
    kept = counts[:-1] if len(counts) >= 4 else counts
    known = [point for point in ordered if point.ranks in kept]
    compute, per_byte, latency = _solve(
        [_columns(point, ordered[0]) for point in known], [one.seconds for one in known]
    )
    return Growth(
        points=ordered,
        compute=compute,
        bandwidth=1 / per_byte if per_byte else math.inf,
        latency=latency,
        fitted=tuple(kept),
        volume=volume or ring(_gradients(ordered)),
    )


def _refuse_invalid(points: Sequence[MeasuredStep]) -> None:
    if not points:
        raise UsageError("nothing was measured: growth needs step times on 1, 2 and 4 ranks, say")
    for point in points:
        numbers = (point.seconds, point.samples, point.volume, point.cores)
        if point.ranks < 1 or point.threads < 1 or not all(0 <= one < math.inf for one in numbers):
            raise UsageError(f"{point} is not a measurement: ranks and threads are 1 or more, nothing is negative")
        if not point.seconds:
            raise UsageError(f"a step on {point.ranks} ranks took no time: measure more steps")


def _columns(point: MeasuredStep, first: MeasuredStep) -> Row:
    """The factors of compute, 1/bandwidth and latency. `first`: the measurement that `compute` refers to."""
    slow = first.share / point.share
    if first.samples and point.samples:
        slow *= (point.samples / point.ranks) / (first.samples / first.ranks)
    volume = point.volume if point.ranks > 1 else 0.0
    return slow, volume * point.crowd, math.log2(point.ranks) * point.crowd


def _solve(rows: Sequence[Row], seconds: Sequence[float]) -> Row:
    """Least squares of relative errors, no factor below 0. Where terms cannot be told apart, computing comes first, and
    bytes come before latency."""
    shares = [[column / took for column in row] for row, took in zip(rows, seconds, strict=True)]
    best, missed = (0.0, 0.0, 0.0), math.inf
    for terms in ((0,), (0, 1), (0, 2), (0, 1, 2)):
        found = _least_squares([[row[term] for term in terms] for row in shares])
        if found is None or min(found) < 0:
            continue
        factors = [0.0, 0.0, 0.0]
        for term, factor in zip(terms, found, strict=True):
            factors[term] = factor
        misses = [sum(map(mul, factors, row)) - 1 for row in shares]
        miss = math.sqrt(fmean(one * one for one in misses))
        if miss < missed - ALIKE:
            best, missed = (factors[0], factors[1], factors[2]), miss
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Factors for which every row adds up to 1; None if the columns depend on each other."""
    matrix = torch.tensor(rows, dtype=torch.float64)
    scales = matrix.norm(dim=0)
    if not scales.all() or torch.linalg.matrix_rank(matrix / scales, rtol=SINGULAR) < len(scales):
        return None
    found = torch.linalg.lstsq(matrix / scales, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    factors: list[float] = (found.flatten() / scales).tolist()
    return factors


def _gradients(points: Sequence[MeasuredStep]) -> float:
    """Bytes of gradients that explain in a ring what each rank sent."""
    sent = [(2 * (one.ranks - 1) / one.ranks, one.volume) for one in points if one.ranks > 1]
    return sum(a * b for a, b in sent) / (sum(a * a for a, _ in sent) or 1.0)
