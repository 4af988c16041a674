"""Renders predictions for more ranks, the checks behind them and what they assume, as text and HTML. Reads
`Outlook.data()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from nbtrain import tables
from nbtrain.humanize import quantity, size
from nbtrain.planning.growth import bandwidth

Data = Mapping[str, Any]

HEAD: tables.Row = ("ranks", "nodes", "a step", "at best", "samples/s", "efficiency", "communication", "sent per rank")
CHECKED: tables.Row = ("ranks here", "measured", "expected", "off by", "")
FAR_OFF = 0.25
"""relative error from which on a check has failed"""
WIDTH = 760


def text(outlook: Data) -> str:
    return "\n".join(
        [
            tables.text(*_predicted(outlook)),
            "",
            tables.text(CHECKED, [_checked(check) for check in outlook["checks"]]),
            "",
            _verdict(outlook),
            "",
            "This assumes:",
            *(f"- {sentence}" for sentence in outlook["assumes"]),
        ]
    )


def html(outlook: Data) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in outlook["assumes"])
    return (
        f'{tables.STYLE}<div style="max-width:{WIDTH}px;overflow-x:auto">{tables.html(*_predicted(outlook))}'
        f"{tables.html(CHECKED, [_checked(check) for check in outlook['checks']])}<p>{escape(_verdict(outlook))}</p>"
        f"<p>This assumes:</p><ul>{sentences}</ul></div>"
    )


def assumptions(outlook: Data) -> Iterator[str]:
    """What the predictions assume, in sentences. `outlook`: the rest of its data."""
    yield from _of_ranks(outlook)
    yield from _of_bytes(outlook)
    if latency := outlook["latency"]:
        yield f"a round between ranks takes {time(latency)}, as fitted here, and there are log2(ranks) of them"
    elif len(outlook["checks"]) > 1:
        yield "a round between ranks takes no time of its own: none was found here"
    if overlap := outlook["overlap"]:
        yield f"{100 * overlap:.0f} % of the communication is hidden behind the computing"
    else:
        yield "none of the communication is hidden behind the computing"
    stated = bandwidth.words(outlook["bandwidth"])
    yield f"at best bytes go at {stated} however slow they were here, and while the ranks compute"
    yield "data arrives in time, no rank waits for a slower one, and nobody else uses the network"


def _of_ranks(outlook: Data) -> Iterator[str]:
    samples, own = outlook["samples_per_rank"], outlook["cores_per_rank"]
    batch = f"the batch of a rank stays at {samples:g} samples, and " if samples else ""
    cores = "1 core" if own == 1 else f"{own:g} cores"
    where = f"{cores} of its own" if outlook["cores"] else "a device of its own"
    yield f"{batch}every rank computes for {time(outlook['compute'])} a step, as here, on {where}"
    crowded = [str(check["ranks"]) for check in outlook["checks"] if check["crowded"]]
    if crowded:
        shared = f"{' and '.join(crowded)} ranks shared {outlook['cores']:g} cores here"
        yield f"{shared}: what that cost in computing and copying is taken out"


def _of_bytes(outlook: Data) -> Iterator[str]:
    here, fitted, stated = outlook["local_bandwidth"], outlook["fitted"], bandwidth.words(outlook["bandwidth"])
    if not any(row["sent"] for row in outlook["rows"]):
        yield "how many bytes a step sends is not known: their time is left out"
        return
    if fitted[-1] == 1:
        yield f"what is sent was never measured: bytes go at {stated} between nodes, as stated, and within one at once"
    elif here is None:
        yield f"bytes go at {stated} between nodes, as stated; within one they take no time: none was found here"
    elif here < outlook["bandwidth"]:
        found = f"bytes go at {bandwidth.words(here)}, as fitted here, within a node and between nodes"
        yield f"{found}: at the stated {stated} no rank has sent any"
    else:
        within = f"at {bandwidth.words(here)} within one, as fitted here"
        yield f"bytes go at {stated} between nodes, as stated, and {within}"
    if len(fitted) == 2:
        yield "with two counts of ranks, what takes bytes and what takes rounds cannot be told apart: it is all bytes"
    if outlook["per_node"] > 1:
        ring = f"{outlook['per_node']} ranks of a node are in one ring with those of the others"
        yield f"{ring}: a node sends what one rank sends"


def _verdict(outlook: Data) -> str:
    """How far the fit can be trusted."""
    fitted, checks = outlook["fitted"], outlook["checks"]
    found = f"Fitted on {', '.join(map(str, fitted))} {'rank' if fitted == [1] else 'ranks'}"
    held_back = [check for check in checks if not check["fitted"]]
    if held_back:
        checked = max(held_back, key=_error)
        found += f", checked against {checked['ranks']}: off by {_percent(checked['error'])}."
    else:
        found += ", and checked against nothing."
    worst = max(checks, key=_error)
    if _error(worst) < FAR_OFF:
        return found
    what = "that" if not worst["fitted"] else f"what was measured on {_ranks(worst['ranks'])}"
    return f"{found} As {what} is so far off, take what is above for an order of magnitude, or measure for more steps."


def _error(check: Data) -> float:
    return abs(float(check["error"]))


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def _predicted(outlook: Data) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (
            f"{row['ranks']:,}", f"{row['nodes']:,}", time(row["seconds"]), time(row["at_best"]),
            quantity(row["samples_per_second"]), f"{100 * row['efficiency']:.0f} %",
            f"{100 * row['communication']:.0f} %", size(row["sent"]) if row["ranks"] > 1 else "",
        )
        for row in outlook["rows"]
    ]  # fmt: skip
    unknown = [at for at, name in enumerate(HEAD) if name == "samples/s" and not outlook["samples_per_rank"]]
    head, *rows = (tuple(cell for at, cell in enumerate(row) if at not in unknown) for row in (HEAD, *rows))
    return head, rows


def _checked(check: Data) -> tables.Row:
    how = "fitted" if check["fitted"] else "held back"
    return str(check["ranks"]), time(check["measured"]), time(check["expected"]), _percent(check["error"]), how


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %".replace("-", "−")


def time(seconds: float) -> str:
    """12 µs, 41.2 ms, 1.23 s"""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * one:
            return f"{quantity(seconds / one)} {unit}"
    return f"{quantity(seconds / 1e-6)} µs"
