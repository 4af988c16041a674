"""How a loop grows, as people read it: predictions, what they were checked against, and what they assume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from nbtrain import tables
from nbtrain.planning.growth import bandwidth
from nbtrain.words import quantity, size

if TYPE_CHECKING:
    from nbtrain.planning.growth.growth import Check, Growth, Outlook

HEAD: tables.Row = ("ranks", "nodes", "a step", "at best", "samples/s", "efficiency", "communication", "sent per rank")
CHECKED: tables.Row = ("ranks here", "measured", "expected", "off by", "")
FAR_OFF = 0.25
"""a check that misses by so much was not passed"""
WIDTH = 760


def text(outlook: Outlook) -> str:
    growth = outlook.growth
    return "\n".join(
        [
            tables.text(*_turned(HEAD, outlook)),
            "",
            tables.text(CHECKED, [_checked(check) for check in growth.checks]),
            "",
            _verdict(growth),
            "",
            "This assumes:",
            *(f"- {sentence}" for sentence in assumptions(outlook)),
        ]
    )


def html(outlook: Outlook) -> str:
    growth = outlook.growth
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in assumptions(outlook))
    return (
        f'{tables.STYLE}<div style="max-width:{WIDTH}px;overflow-x:auto">{tables.html(*_turned(HEAD, outlook))}'
        f"{tables.html(CHECKED, [_checked(check) for check in growth.checks])}<p>{escape(_verdict(growth))}</p>"
        f"<p>This assumes:</p><ul>{sentences}</ul></div>"
    )


def data(outlook: Outlook) -> dict[str, Any]:
    growth = outlook.growth
    return {
        "bandwidth": outlook.bandwidth,
        "per_node": outlook.per_node,
        "compute": growth.compute,
        "local_bandwidth": growth.bandwidth if growth.bandwidth < math.inf else None,
        "latency": growth.latency,
        "rows": [
            {
                "ranks": row.ranks,
                "nodes": row.nodes,
                "seconds": row.seconds,
                "at_best": row.at_best,
                "samples_per_second": row.samples,
                "efficiency": row.efficiency,
                "communication": row.waiting,
            }
            for row in outlook.rows
        ],
        "checks": [
            {
                "ranks": check.point.ranks,
                "measured": check.point.seconds,
                "expected": check.expected,
                "error": check.error,
                "fitted": check.fitted,
            }
            for check in growth.checks
        ],
        "assumes": list(assumptions(outlook)),
    }


def assumptions(outlook: Outlook) -> Iterator[str]:
    """In sentences."""
    growth = outlook.growth
    yield from _of_ranks(growth)
    yield from _of_bytes(outlook)
    if growth.latency:
        yield f"a round between ranks takes {time(growth.latency)}, as fitted here, and there are log2(ranks) of them"
    elif len(growth.points) > 1:
        yield "a round between ranks takes no time of its own: none was found here"
    if outlook.overlap:
        yield f"{100 * outlook.overlap:.0f} % of the communication is hidden behind the computing"
    else:
        yield "none of the communication is hidden behind the computing"
    stated = bandwidth.words(outlook.bandwidth)
    yield f"at best bytes go at {stated} however slow they were here, and while the ranks compute"
    yield "data arrives in time, no rank waits for a slower one, and nobody else uses the network"


def _of_ranks(growth: Growth) -> Iterator[str]:
    first = growth.points[0]
    batch = f"the batch of a rank stays at {first.samples / first.ranks:g} samples, and " if first.samples else ""
    cores = "1 core" if first.share == 1 else f"{first.share:g} cores"
    where = f"{cores} of its own" if first.cores else "a device of its own"
    yield f"{batch}every rank computes for {time(growth.compute)} a step, as here, on {where}"
    crowded = [str(point.ranks) for point in growth.points if point.crowd > 1]
    if crowded:
        shared = f"{' and '.join(crowded)} ranks shared {first.cores:g} cores here"
        yield f"{shared}: what that cost in computing and copying is taken out"


def _of_bytes(outlook: Outlook) -> Iterator[str]:
    growth = outlook.growth
    here, stated = growth.bandwidth, bandwidth.words(outlook.bandwidth)
    if not any(growth.volume(row.ranks) for row in outlook.rows):
        yield "how many bytes a step sends is not known: their time is left out"
        return
    if growth.fitted[-1] == 1:
        yield f"what is sent was never measured: bytes go at {stated} between nodes, as stated, and within one at once"
    elif here == math.inf:
        yield f"bytes go at {stated} between nodes, as stated; within one they take no time: none was found here"
    elif here < outlook.bandwidth:
        fitted = f"bytes go at {bandwidth.words(here)}, as fitted here, within a node and between nodes"
        yield f"{fitted}: at the stated {stated} no rank has sent any"
    else:
        within = f"at {bandwidth.words(here)} within one, as fitted here"
        yield f"bytes go at {stated} between nodes, as stated, and {within}"
    if len(growth.fitted) == 2:
        yield "with two counts of ranks, what takes bytes and what takes rounds cannot be told apart: it is all bytes"
    if outlook.per_node > 1:
        ring = f"{outlook.per_node} ranks of a node are in one ring with those of the others"
        yield f"{ring}: a node sends what one rank sends"


def _verdict(growth: Growth) -> str:
    """How far the fit can be trusted."""
    found = f"Fitted on {', '.join(map(str, growth.fitted))} {'rank' if growth.fitted == (1,) else 'ranks'}"
    worst = max(growth.checks, key=lambda check: abs(check.error))
    if growth.held_back:
        checked = max(growth.held_back, key=lambda check: abs(check.error))
        found += f", checked against {checked.point.ranks}: off by {_percent(checked.error)}."
    else:
        found += ", and checked against nothing."
    if abs(worst.error) < FAR_OFF:
        return found
    what = "that" if not worst.fitted else f"what was measured on {_ranks(worst.point.ranks)}"
    return f"{found} As {what} is so far off, take what is above for an order of magnitude, or measure for more steps."


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def _turned(head: tables.Row, outlook: Outlook) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (
            f"{row.ranks:,}", f"{row.nodes:,}", time(row.seconds), time(row.at_best), quantity(row.samples),
            f"{100 * row.efficiency:.0f} %", f"{100 * row.waiting:.0f} %",
            size(outlook.growth.volume(row.ranks)) if row.ranks > 1 else "",
        )
        for row in outlook.rows
    ]  # fmt: skip
    unknown = [at for at, name in enumerate(head) if name == "samples/s" and not outlook.growth.points[0].samples]
    head, *rows = (tuple(cell for at, cell in enumerate(row) if at not in unknown) for row in (head, *rows))
    return head, rows


def _checked(check: Check) -> tables.Row:
    point = check.point
    how = "fitted" if check.fitted else "held back"
    return str(point.ranks), time(point.seconds), time(check.expected), _percent(check.error), how


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %".replace("-", "−")


def time(seconds: float) -> str:
    """12 µs, 41.2 ms, 1.23 s"""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * one:
            return f"{quantity(seconds / one)} {unit}"
    return f"{quantity(seconds / 1e-6)} µs"
