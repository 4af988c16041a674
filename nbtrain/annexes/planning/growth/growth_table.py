"""Renders predictions for more ranks, the checks behind them and what they assume, as text and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nbtrain.annexes.planning.growth.growth import Check, Growth, Prediction
from nbtrain.base import tables
from nbtrain.base.humanize import quantity, size, time

COUNTS = (8, 64, 512)
"""ranks that are predicted"""

HEAD: tables.Row = ("ranks", "nodes", "a step", "at best", "samples/s", "efficiency", "communication", "sent per rank")
CHECKED: tables.Row = ("ranks here", "measured", "expected", "off by", "")
FAR_OFF = 0.25
"""relative error from which on a check has failed"""


@dataclass(frozen=True, kw_only=True)
class GrowthForecast:
    """Predictions for more ranks than there are here."""

    growth: Growth
    rows: tuple[Prediction, ...]
    bandwidth: float
    """bytes per second between nodes, as stated"""

    @classmethod
    def of(cls, growth: Growth, bandwidth: float) -> GrowthForecast:
        rows = tuple(growth.predict(count, bandwidth) for count in COUNTS)
        return cls(growth=growth, rows=rows, bandwidth=bandwidth)

    def __repr__(self) -> str:
        return tables.blocks_text(_blocks(self))

    def _repr_html_(self) -> str:
        return tables.page(_blocks(self))


def _blocks(forecast: GrowthForecast) -> Iterator[tables.Block]:
    yield _predicted(forecast)
    yield CHECKED, [_checked(check) for check in forecast.growth.checks]
    yield _verdict(forecast)
    yield "\n- ".join(["This assumes:", *_assumptions(forecast)])


def _assumptions(forecast: GrowthForecast) -> Iterator[str]:
    yield from _of_ranks(forecast)
    yield from _of_bytes(forecast)
    if latency := forecast.growth.latency:
        yield f"a round between ranks takes {time(latency)} (fitted here); a step has log2(ranks) rounds"
    else:
        yield "a round between ranks takes no time: none was found here"
    yield "none of the communication is hidden behind the computing"
    yield f"at best: bytes travel at {size(forecast.bandwidth)}/s while the ranks compute"
    yield "data arrives in time, all ranks are equally fast, and the network is free"


def _of_ranks(forecast: GrowthForecast) -> Iterator[str]:
    growth, first = forecast.growth, forecast.growth.points[0]
    batch = f"a rank's batch stays at {first.samples / first.ranks:g} samples; " if first.samples else ""
    cores = "1 core" if first.share == 1 else f"{first.share:g} cores"
    where = f"{cores} of its own" if first.cores else "a device of its own"
    yield f"{batch}every rank computes {time(growth.compute)} per step, as here, on {where}"
    crowded = [str(point.ranks) for point in growth.points if point.crowd > 1]
    if crowded:
        shared = f"{' and '.join(crowded)} ranks shared {first.cores:g} cores here"
        yield f"{shared}: the cost of sharing is subtracted"


def _of_bytes(forecast: GrowthForecast) -> Iterator[str]:
    here, stated = forecast.growth.bandwidth, f"{size(forecast.bandwidth)}/s"
    if not any(row.sent for row in forecast.rows):
        yield "the bytes sent per step are not known: their time is left out"
        return
    if here == math.inf:
        yield f"bytes travel at the stated {stated} between nodes; within one they take no time: none was found here"
    elif here < forecast.bandwidth:
        fitted = f"bytes travel at {size(here)}/s (fitted here) within a node and between nodes"
        yield f"{fitted}: the stated {stated} is faster than any rank was here"
    else:
        yield f"bytes travel at the stated {stated} between nodes, and at {size(here)}/s within one (fitted here)"
    if len(forecast.growth.fitted) == 2:
        yield "two counts of ranks cannot separate bandwidth from latency: all of it counts as bandwidth"
    yield "the 8 ranks of a node share one ring with other nodes: a node sends what one rank sends"


def _verdict(forecast: GrowthForecast) -> str:
    """How far the fit can be trusted."""
    checks = forecast.growth.checks
    said = f"Fitted on {', '.join(map(str, forecast.growth.fitted))} ranks"
    held_back = [check for check in checks if not check.fitted]
    if held_back:
        said += f", checked against {held_back[0].point.ranks}: off by {_percent(held_back[0].error)}."
    else:
        said += ", not checked."
    worst = max(checks, key=lambda check: abs(check.error))
    if abs(worst.error) < FAR_OFF:
        return said
    ranks = f"{worst.point.ranks} rank{'s' * (worst.point.ranks > 1)}"
    what = "it" if not worst.fitted else f"what was measured on {ranks}"
    return f"{said} As {what} is that far off, read the table as an order of magnitude, or measure more steps."


def _predicted(forecast: GrowthForecast) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (
            f"{row.ranks:,}", f"{row.nodes:,}", time(row.seconds), time(row.at_best), quantity(row.samples),
            f"{100 * row.efficiency:.0f} %", f"{100 * (1 - row.efficiency):.0f} %", size(row.sent),
        )
        for row in forecast.rows
    ]  # fmt: skip
    unknown = [HEAD.index("samples/s")] if not forecast.growth.points[0].samples else []
    head, *rows = (tuple(cell for at, cell in enumerate(row) if at not in unknown) for row in (HEAD, *rows))
    return head, rows


def _checked(check: Check) -> tables.Row:
    how = "fitted" if check.fitted else "held back"
    return str(check.point.ranks), time(check.point.seconds), time(check.expected), _percent(check.error), how


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %".replace("-", "−")
