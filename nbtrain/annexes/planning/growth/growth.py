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

import torch

PER_NODE = 8
ALIKE = 1e-6
"""a term that improves the fit by less than this share of a step is left out"""

SINGULAR = 1e-5
"""relative tolerance below which a column depends on the others"""

Row = tuple[float, float, float]
Volume = Callable[[int], float]
"""bytes that each of so many ranks sends per step"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """How long a step was measured to take on `ranks` ranks."""

    ranks: int
    seconds: float
    """per step"""
    samples: float = 0
    """samples per step of all ranks together; 0: not known"""
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
    """seconds"""
    at_best: float
    """seconds of a step if bytes move at the stated bandwidth and overlap with computing"""
    samples: float
    """samples per second of all ranks; 0: not known"""

    sent: float
    """bytes that a rank sends per step"""

    @property
    def seconds(self) -> float:
        """Of a step, with nothing hidden behind the computing."""
        return self.compute + self.communication

    @property
    def efficiency(self) -> float:
        """Share of a step that is computing."""
        return self.compute / self.seconds


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

    def expected(self, point: MeasuredStep) -> float:
        """Seconds of a step under the conditions of a measurement."""
        factors = (self.compute, 1 / self.bandwidth, self.latency)
        return float(sum(map(mul, factors, _columns(point, self.points[0], self.volume))))

    def predict(self, ranks: int, bandwidth: float) -> Prediction:
        """`bandwidth`: bytes per second between nodes, each way."""
        nodes, first = -(-ranks // PER_NODE), self.points[0]
        communication = self._communication(ranks, min(self.bandwidth, bandwidth) if nodes > 1 else self.bandwidth)
        best = self._communication(ranks, bandwidth if nodes > 1 else max(self.bandwidth, bandwidth))
        seconds = self.compute + communication
        return Prediction(
            ranks=ranks,
            nodes=nodes,
            compute=self.compute,
            communication=communication,
            at_best=min(seconds, max(self.compute, best)),
            samples=first.samples / first.ranks * ranks / seconds,
            sent=self.volume(ranks),
        )

    def _communication(self, ranks: int, rate: float) -> float:
        return self.volume(ranks) / rate + self.latency * math.log2(ranks)


def ring(size: float) -> Volume:
    """Bytes that each rank sends when gradients of `size` bytes are averaged in a ring."""
    return lambda ranks: 2 * (ranks - 1) / ranks * size


def fit(points: Sequence[MeasuredStep], volume: Volume) -> Growth:
    """Fit the model to measurements. With four or more counts of ranks, the largest is held back and only checked."""
    ordered = tuple(sorted(points, key=lambda point: point.ranks))
    known = ordered[:-1] if len(ordered) >= 4 else ordered
    compute, per_byte, latency = _solve(
        [_columns(point, ordered[0], volume) for point in known], [point.seconds for point in known]
    )
    return Growth(
        points=ordered,
        compute=compute,
        bandwidth=1 / per_byte if per_byte else math.inf,
        latency=latency,
        fitted=tuple(point.ranks for point in known),
        volume=volume,
    )


def _columns(point: MeasuredStep, first: MeasuredStep, volume: Volume) -> Row:
    """The factors of compute, 1/bandwidth and latency. `first`: the measurement that `compute` refers to."""
    slow = first.share / point.share
    if first.samples and point.samples:
        slow *= (point.samples / point.ranks) / (first.samples / first.ranks)
    sent = volume(point.ranks) if point.ranks > 1 else 0.0
    return slow, sent * point.crowd, math.log2(point.ranks) * point.crowd


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
